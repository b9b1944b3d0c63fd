/* The command line as a user meets it: exit codes, sentences, JSON that parses. argv[0] of the program
 * under test comes from TREFOIL_PROGRAM. */
#include "test.h"

#include "api/hang_record.h"

#include <jansson.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct output {
  int code;
  char out[1 << 16], err[1 << 14];
} output_t;
static output_t o;

static void slurp(const char *path, char *text, size_t bytes) {
  FILE *f = fopen(path, "r");
  size_t n = f ? fread(text, 1, bytes - 1, f) : 0;
  text[n] = 0;
  if (f) fclose(f);
}

static void run(const char *arguments) {
  char command[4096], out[64], err[64];
  snprintf(out, sizeof out, "/tmp/trefoil-cli-%d.out", (int)getpid());
  snprintf(err, sizeof err, "/tmp/trefoil-cli-%d.err", (int)getpid());
  snprintf(command, sizeof command, "%s %s >%s 2>%s </dev/null", getenv("TREFOIL_PROGRAM"),
           arguments, out, err);
  int status = system(command);
  o.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  slurp(out, o.out, sizeof o.out);
  slurp(err, o.err, sizeof o.err);
  unlink(out);
  unlink(err);
}

/* Exit code 2, nothing on stdout, one sentence that has `word`. */
static void expectUsage(const char *arguments, const char *word) {
  run(arguments);
  CHECK(o.code == 2, "trefoil %s: exit code %d", arguments, o.code);
  CHECK(o.out[0] == 0, "trefoil %s prints '%s'", arguments, o.out);
  CHECK(strstr(o.err, word), "trefoil %s: '%s' is not in '%s'", arguments, word, o.err);
}

TEST(wrong_command_lines_are_sentences) {
  expectUsage("", "VERB");
  expectUsage("chekc", "'chekc'");
  expectUsage("check --bogus", "--bogus");
  expectUsage("check extra", "'extra'");
  expectUsage("check --modes ll,xx", "ll,xx");
  expectUsage("check --modes ''", "--modes");
  expectUsage("check --ranks 0", "--ranks 0");
  expectUsage("check --ranks 4-2", "--ranks 4-2");
  expectUsage("check --ranks 4x", "--ranks 4x");
  expectUsage("check --ranks 17", "16");
  expectUsage("check --level loose", "--level loose");
  expectUsage("check --cases abc", "abc: invalid numeric value");
  expectUsage("check --cases 0", "--cases 0");
  expectUsage("check --jobs 1000", "--jobs 1000");
  expectUsage("check --hidden 0 --experts 8 --topk 2", "--hidden");
  expectUsage("check --hidden 64 --experts 2 --topk 3", "top-k");
  expectUsage("check --hidden 64 --experts 8 --topk 2 --ranks 8 --ranks-per-node 3", "divisor");
  expectUsage("check --hidden 64 --experts 8 --topk 2 --tokens 0", "--tokens 0");
  expectUsage("check --moe no-such-model", "no-such-model");
  expectUsage("check --ranks-per-node 2 --profile nccl-ep-0.2", "does not go with --profile");
  expectUsage("bench --repeats 0", "--repeats");
  expectUsage("doctor --hang", "--hang");
  expectUsage("doctor somefile", "somefile");
}

/* A number out of range is never taken for "the default". */
TEST(numbers_out_of_range_are_refused) {
  static const char *const lines[][2] = {
      {"check --cases -5", "--cases -5"},
      {"check --case -3", "--case -3"},
      {"check --seconds -1", "--seconds -1"},
      {"check --seconds nan", "--seconds nan"},
      {"check --seconds inf", "--seconds inf"},
      {"check --jobs 0", "--jobs 0"},
      {"check --timeout-ms -3", "--timeout-ms -3"},
      {"check --timeout-ms 0", "--timeout-ms 0"},
      {"check --moe deepseek-v3 --hidden 0", "--hidden 0"},
      {"check --moe deepseek-v3 --experts 0", "--experts 0"},
      {"check --moe deepseek-v3 --topk -1", "--topk -1"},
      {"check --moe deepseek-v3 --tokens -1", "--tokens -1"},
      {"check --moe deepseek-v3 --ranks-per-node 0", "--ranks-per-node 0"},
      {"bench --hidden 0", "--hidden 0"},
      {"bench --experts 0", "--experts 0"},
      {"bench --seconds -1", "--seconds -1"},
      {"bench --tokens 0", "--tokens 0"},
      {"plan --closed-form --tokens 0", "--tokens 0"},
      {"plan --closed-form --ep 0", "--ep 0"},
      {"plan --closed-form --physical-experts -1", "--physical-experts -1"},
      {"trace generate --skew -1 x.npz", "--skew -1"},
      {"trace generate --experts 0 x.npz", "--experts 0"},
      {"trace generate --ranks 0 x.npz", "--ranks 0"},
      {"trace generate --ragged nan x.npz", "--ragged nan"},
      {"trace generate --empty-ranks 9 x.npz", "empty ranks 9"},
      {"trace describe --step -1 x.npz", "--step -1"},
      {"trace describe --row-bytes 0 x.npz", "--row-bytes 0"},
  };
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) expectUsage(lines[i][0], lines[i][1]);
}

/* An option that would be ignored is refused. */
TEST(options_of_the_other_form_are_refused) {
  expectUsage("check --hidden 64 --experts 8 --topk 2 --cases 5", "--cases");
  expectUsage("check --moe deepseek-v3 --case 5", "--case");
  expectUsage("check --moe deepseek-v3 --seconds 5", "--seconds");
  expectUsage("check --moe deepseek-v3 --jobs 2", "--jobs");
  expectUsage("check --moe deepseek-v3 --processes", "--processes");
  expectUsage("bench --variant plain", "--variant goes with --gpu");
  expectUsage("bench --plot x.svg", "--plot goes with --gpu");
  expectUsage("bench --tokens 8,16 --seconds 0", "--tokens 8,16");
}

/* Without the library for GPUs beside the program: which one? With it, but no GPU: that. */
TEST(gpu_needs_a_library_and_a_gpu) {
  static const char *const lines[] = {"check --gpu --cases 1 --modes ll",
                                      "bench --gpu --tokens 1 --variant plain --hidden 512"};
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
    run(lines[i]);
    int noLibrary = o.code == 2 && strstr(o.err, "--library");
    int noGpu = o.code == 1 && (strstr(o.err, "finds no GPU") || strstr(o.err, "cannot load"));
    int works = o.code == 0 && strstr(o.out, "libnccl_ep.so.0");
    CHECK(noLibrary || noGpu || works, "%s: %d %s %s", lines[i], o.code, o.out, o.err);
  }
}

/* Random cases share them, as processes; in real shapes ranks are threads. */
TEST(more_ranks_than_gpus) {
  setenv("TREFOIL_HOST_DEVICES", "2", 1);
  run("check --ranks 4 --cases 1");
  CHECK(!o.code && strstr(o.out, "ranks shared 2 GPUs, a process each"), "%d %s", o.code, o.out);
  run("check --hidden 64 --experts 8 --topk 2 --ranks 4 --mode ll");
  CHECK(o.code && strstr(o.err, "4 ranks on 2 GPUs"), "%d %s", o.code, o.err);
  run("check --cases 64");
  CHECK(o.code == 0, "%d %s", o.code, o.err);
  unsetenv("TREFOIL_HOST_DEVICES");
}

TEST(pretended_devices_are_a_number) {
  static const char *const bad[] = {"65", "abc", "0", "-1", "3x"};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    setenv("TREFOIL_HOST_DEVICES", bad[i], 1);
    run("check --cases 1");
    CHECK(o.code == 1 && strstr(o.err, "expected a whole number from 1 to 64"), "%s: %d %s", bad[i],
          o.code, o.err);
    run("check --hidden 64 --experts 8 --topk 2 --ranks 2 --mode ll");
    CHECK(o.code == 1 && strstr(o.err, "expected a whole number from 1 to 64"), "%s: %d %s", bad[i],
          o.code, o.err);
  }
  unsetenv("TREFOIL_HOST_DEVICES");
}

/* Nothing that was asked for is ignored: pretended nodes were not checked on GPUs. */
TEST(pretended_nodes_on_gpus_are_refused) {
  setenv("NCCL_LSA_TEAM_SIZE", "2", 1);
  expectUsage("check --gpu-cases --cases 64", "NCCL_LSA_TEAM_SIZE is set");
  unsetenv("NCCL_LSA_TEAM_SIZE");
}

/* What a launcher says must be whole, and fit. */
TEST(launches_are_checked) {
  static const char *const bad[][3] = {{"3", NULL, "WORLD_SIZE"},
                                       {"2", "2", "rank 2 of 2"},
                                       {"x", "2", "RANK=x"},
                                       {"0", "100", "at most 64"}};
  for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
    setenv("RANK", bad[i][0], 1);
    if (bad[i][1]) setenv("WORLD_SIZE", bad[i][1], 1);
    expectUsage("check --cases 1", bad[i][2]);
    unsetenv("RANK");
    unsetenv("WORLD_SIZE");
  }
  setenv("RANK", "0", 1);
  setenv("WORLD_SIZE", "2", 1);
  expectUsage("check --cases 1 --ranks 3", "--ranks 3");
  expectUsage("check --cases 1 --processes", "--processes");
  expectUsage("check --cases 1 --jobs 2", "--jobs");
  expectUsage("check --moe deepseek-v3", "launch of 2");
  expectUsage("bench --mode ll", "launch of 2");
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
}

/* --gpu is obeyed whatever the library's name is: NCCL and CUDA come from the loader, so that (on a
 * machine without them) the run is refused, not done on the host runtime. */
TEST(gpu_means_gpu) {
  run("check --cases 1 --library /nonexistent_cpu/libx_cpu.so --gpu --json");
  CHECK(o.code == 1 && o.out[0] == 0, "%d %s", o.code, o.out);
  run("check --cases 1 --json");
  json_error_t error;
  json_t *j = json_loads(o.out, 0, &error);
  REQUIRE(j, "%s", o.err);
  char command[3000];
  const char *library = json_string_value(json_object_get(j, "library"));
  const char *nccl = json_string_value(json_object_get(j, "nccl"));
  REQUIRE(library && nccl && strstr(nccl, "trefoil_host"), "%s", o.out);
  snprintf(command, sizeof command,
           "check --cases 1 --library %s --gpu --nccl /nonexistent-nccl.so", library);
  run(command);
  CHECK(o.code == 1 && strstr(o.err, "/nonexistent-nccl.so"), "%d %s", o.code, o.err);
  snprintf(command, sizeof command,
           "check --cases 1 --library %s --gpu --cuda /nonexistent-cuda.so"
           " --nccl %s",
           library, nccl);
  run(command);
  CHECK(o.code == 1 && strstr(o.err, "/nonexistent-cuda.so"), "%d %s", o.code, o.err);
  json_decref(j);
}

TEST(output_that_is_not_taken_is_told) {
  static const char *const lines[] = {"--help",
                                      "--version",
                                      "check --cases 1",
                                      "doctor",
                                      "plan --closed-form --gpus 8",
                                      "check --cases 1 --json"};
  for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
    char command[512];
    snprintf(command, sizeof command, "%s %s >/dev/full 2>/tmp/trefoil-cli-full.%d",
             getenv("TREFOIL_PROGRAM"), lines[i], (int)getpid());
    int status = system(command);
    char path[64];
    snprintf(path, sizeof path, "/tmp/trefoil-cli-full.%d", (int)getpid());
    slurp(path, o.err, sizeof o.err);
    unlink(path);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 1, "%s: %d", lines[i], status);
    CHECK(strstr(o.err, "could not be written"), "%s: %s", lines[i], o.err);
  }
}

TEST(a_shape_beyond_memory_is_refused_before_it_starts) {
  run("check --moe deepseek-v3 --ranks 16 --tokens 1048576 --hidden 1048576");
  CHECK(o.code == 1 && strstr(o.err, "of memory"), "%d %s", o.code, o.err);
}

TEST(what_cannot_be_done_is_said) {
  run("check --cases 1 --library /nonexistent.so");
  CHECK(o.code == 1 && strstr(o.err, "/nonexistent.so"), "%d %s", o.code, o.err);
  run("check --cases 1 --library libm.so.6");
  CHECK(o.code == 1 && strstr(o.err, "has no function ncclEp"), "%d %s", o.code, o.err);
  run("check --cases 1 --library ''");
  CHECK(o.code == 1 && strstr(o.err, "library is empty"), "%d %s", o.code, o.err);
  run("doctor --hang /nonexistent.hang");
  CHECK(o.code == 1 && strstr(o.err, "/nonexistent.hang"), "%d %s", o.code, o.err);
}

TEST(every_verb_helps) {
  static const char *const verbs[] = {"check", "bench", "doctor"};
  for (int i = 0; i < 3; i++) {
    char arguments[64];
    snprintf(arguments, sizeof arguments, "%s --help", verbs[i]);
    run(arguments);
    CHECK(o.code == 0, "%s: %d", arguments, o.code);
    CHECK(strstr(o.out, "--json") && strstr(o.out, verbs[i]), "%s: %s", arguments, o.out);
  }
  run("--help");
  CHECK(o.code == 0 && strstr(o.out, "doctor"), "%s", o.out);
  run("--version");
  CHECK(o.code == 0 && !strncmp(o.out, "trefoil ", 8), "%s", o.out);
}

static json_t *parse(void) {
  json_error_t error;
  json_t *j = json_loads(o.out, JSON_REJECT_DUPLICATES, &error);
  CHECK(j, "not JSON: %s in '%.200s'", error.text, o.out);
  return j;
}

TEST(doctor_reports_facts) {
  run("doctor --json");
  json_t *j = parse();
  REQUIRE(j, "%s", o.err);
  CHECK(json_array_size(json_object_get(j, "facts")) >= 10, "%s", o.out);
  CHECK(json_string_length(json_object_get(j, "do")) > 0, "%s", o.out);
  CHECK(json_is_true(json_object_get(j, "ok")) == (o.code == 0), "exit code %d", o.code);
  json_decref(j);
}

TEST(check_reports_cases) {
  run("check --cases 100 --seed 4 --ranks 2-3 --json");
  json_t *j = parse();
  REQUIRE(j, "%s", o.err);
  CHECK(o.code == 0, "%d: %s", o.code, o.out);
  CHECK(json_integer_value(json_object_get(j, "cases")) == 100, "%s", o.out);
  CHECK(json_integer_value(json_object_get(j, "failed")) == 0, "%s", o.out);
  CHECK(json_integer_value(json_object_get(j, "bytes_compared")) > 0, "%s", o.out);
  CHECK(o.err[0] == 0, "quiet off a terminal: '%s'", o.err);
  json_decref(j);
}

/* A small real shape on two pretended nodes: what docs/check.md promises is there and adds up. */
TEST(check_reports_a_real_shape) {
  run("check --hidden 64 --experts 8 --topk 2 --ranks 4 --ranks-per-node 2 --tokens 100 --json");
  json_t *j = parse();
  REQUIRE(j, "%s", o.err);
  CHECK(o.code == 0, "%d: %s", o.code, o.out);
  json_t *runs = json_object_get(j, "runs");
  CHECK(json_array_size(runs) == 4, "%zu runs", json_array_size(runs));
  size_t i;
  json_t *r;
  json_array_foreach(runs, i, r) {
    static const char *const numbers[] = {
        "ranks",          "ranks_per_node", "tokens",     "hidden",    "experts",    "topk",
        "bytes_compared", "update_s",       "dispatch_s", "combine_s", "reference_s"};
    for (size_t n = 0; n < sizeof numbers / sizeof *numbers; n++)
      CHECK(json_is_number(json_object_get(r, numbers[n])), "%s", numbers[n]);
    CHECK(json_is_true(json_object_get(r, "ok")), "run %zu: %s", i,
          json_string_value(json_object_get(r, "difference")));
    const char *mode = json_string_value(json_object_get(r, "mode"));
    json_int_t rows = 0, sum = 0;
    size_t a, b;
    json_t *line, *cell;
    json_array_foreach(json_object_get(r, "received_rows"), a, cell) rows +=
        json_integer_value(cell);
    json_array_foreach(json_object_get(r, "dispatch_bytes"), a, line) {
      CHECK(json_array_size(line) == 4, "row %zu", a);
      json_array_foreach(line, b, cell) {
        sum += json_integer_value(cell);
        const char *tier =
            json_string_value(json_array_get(json_array_get(json_object_get(r, "tiers"), a), b));
        const char *wanted = a == b ? "self" : a / 2 == b / 2 ? "nvlink" : "net";
        CHECK(tier && !strcmp(tier, wanted), "tier of %zu, %zu: %s", a, b, tier);
      }
    }
    /* LL rank-major goes straight: one row on the way is one row received. */
    if (!strcmp(mode, "ll-rank-major"))
      CHECK(sum == rows * 64 * 2, "%lld bytes for %lld rows", (long long)sum, (long long)rows);
  }
  json_decref(j);
}

/* ---- doctor --hang on records made up here ---- */

static char files[4][64];

static void writeRecord(int rank, int numRanks, uint64_t number, ep_hang_state_t state, int peer,
                        int pid) {
  ep_hang_record_t r = {.magic = EP_HANG_MAGIC,
                        .version = EP_HANG_VERSION,
                        .bytes = sizeof r,
                        .rank = rank,
                        .numRanks = numRanks,
                        .ranksPerNode = numRanks,
                        .pid = pid,
                        .groupId = 77,
                        .culprit = -1};
  gethostname(r.host, sizeof r.host - 1);
  r.kinds[1] =
      (ep_hang_kind_t){.state = state,
                       .number = number,
                       .sinceNs = ((uint64_t)time(NULL) - 5) * 1000000000u + (unsigned)rank,
                       .peer = peer};
  strcpy(r.kinds[1].what, "rows");
  snprintf(files[rank], sizeof files[rank], "/tmp/trefoil-%d-%d.hang", (int)getpid(), rank);
  FILE *f = fopen(files[rank], "wb");
  if (!f || fwrite(&r, sizeof r, 1, f) != 1) CHECK(0, "cannot write %s", files[rank]);
  if (f) fclose(f);
}

/* As kernels leave it: five dispatches and four combines are finished; a wait of Combine 5, or none. */
static void writeDeviceRecord(int rank, int numRanks, uint32_t kind, uint32_t phase, int peer) {
  writeRecord(rank, numRanks, 0, EP_HANG_IDLE, -1, (int)getpid());
  ep_hang_record_t r;
  FILE *f = fopen(files[rank], "r+b");
  if (!f || fread(&r, sizeof r, 1, f) != 1) CHECK(0, "cannot read %s", files[rank]);
  r.device = (ep_hang_device_t){.used = 1, .finished = {5, 4, 0}};
  if (phase) {
    r.device.wait = (ep_wait_record_t){.state = 1,
                                       .kind = kind,
                                       .phase = phase,
                                       .rank = peer,
                                       .operation = 5,
                                       .expected = 7,
                                       .received = epHangHasReceived(kind, phase) ? 6 : 0,
                                       .item = phase == EP_WAIT_ROWS ? 3 : -1,
                                       .sinceNs = ((uint64_t)time(NULL) - 5) * 1000000000u};
  }
  if (f && (fseek(f, 0, SEEK_SET) || fwrite(&r, sizeof r, 1, f) != 1))
    CHECK(0, "cannot write %s", files[rank]);
  if (f) fclose(f);
}

static void doctorHang(int n, int code, const char *words) {
  char arguments[512] = "doctor --hang";
  for (int i = 0; i < n; i++) {
    strcat(arguments, " ");
    strcat(arguments, files[i]);
  }
  run(arguments);
  CHECK(o.code == code, "exit code %d: %s%s", o.code, o.out, o.err);
  CHECK(strstr(o.out, words), "'%s' is not in '%s'", words, o.out);
}

static void doctorHangRefuses(const char *file) {
  char arguments[256];
  snprintf(arguments, sizeof arguments, "doctor --hang %s", file);
  run(arguments);
  CHECK(o.code == 1 && strstr(o.err, "not a progress record"), "%d %s", o.code, o.err);
}

TEST(hang_names_the_culprit) {
  int me = (int)getpid();
  /* 0 waits for 1, 1 for 2, which has not come. */
  writeRecord(0, 3, 5, EP_HANG_WAITING, 1, me);
  writeRecord(1, 3, 5, EP_HANG_WAITING, 2, me);
  writeRecord(2, 3, 4, EP_HANG_IDLE, -1, me);
  doctorHang(3, 1, "has not come to Dispatch 5: it has finished Dispatch 4");
  CHECK(!strncmp(o.out, "rank 2 ", 7), "%s", o.out);
  doctorHang(2, 1, "rank 2 left no record");
  /* The same, but its process is gone. */
  pid_t gone = fork();
  if (gone == 0) _exit(0);
  waitpid(gone, NULL, 0);
  writeRecord(2, 3, 5, EP_HANG_RUNNING, -1, (int)gone);
  doctorHang(3, 1, "it ended in Dispatch 5");
  CHECK(!strncmp(o.out, "rank 2 is gone", 14), "%s", o.out);
  /* 1 and 2 wait for one another. */
  writeRecord(2, 3, 5, EP_HANG_WAITING, 1, me);
  doctorHang(3, 1, "wait for one another");
  /* No peer named: who is furthest behind. */
  writeRecord(0, 3, 5, EP_HANG_WAITING, -1, me);
  writeRecord(1, 3, 3, EP_HANG_RUNNING, -1, me);
  writeRecord(2, 3, 5, EP_HANG_IDLE, -1, me);
  doctorHang(3, 1, "rank 1 ");
  /* All is well. */
  writeRecord(0, 3, 5, EP_HANG_IDLE, -1, me);
  writeRecord(1, 3, 5, EP_HANG_IDLE, -1, me);
  doctorHang(3, 0, "nobody waits");
  /* A ring in a group that claims a great many ranks: as quick as any. */
  writeRecord(0, 2000000000, 5, EP_HANG_WAITING, 1, me);
  writeRecord(1, 2000000000, 5, EP_HANG_WAITING, 0, me);
  doctorHang(2, 1, "wait for one another");
  /* A process id that would mean a group of processes. */
  writeRecord(0, 3, 5, EP_HANG_WAITING, 1, -1);
  doctorHangRefuses(files[0]);
  /* A truncated file. */
  CHECK(truncate(files[1], 100) == 0, "truncate");
  doctorHangRefuses(files[1]);
  for (int i = 0; i < 3; i++) unlink(files[i]);
}

/* Neither waits for a writer nor reads without end. */
TEST(hang_takes_files_alone) {
  char fifo[64], line[128];
  snprintf(fifo, sizeof fifo, "/tmp/trefoil-%d.fifo", (int)getpid());
  REQUIRE(mkfifo(fifo, 0600) == 0, "mkfifo");
  snprintf(line, sizeof line, "doctor --hang %s", fifo);
  run(line);
  CHECK(o.code == 1 && strstr(o.err, "not a progress record"), "%d %s", o.code, o.err);
  unlink(fifo);
  run("doctor --hang /dev/zero");
  CHECK(o.code == 1 && strstr(o.err, "not a progress record"), "%d %s", o.code, o.err);
}

/* The same of what models, clusters and kept results are read from. */
TEST(only_regular_files_are_read) {
  static const char *const verbs[] = {"simulate --gpus 8 --moe", "simulate --gpus 8 --cluster",
                                      "simulate --gpus 8 --costs", "trace describe",
                                      "conform --from"};
  char fifo[64], line[160];
  snprintf(fifo, sizeof fifo, "/tmp/trefoil-%d.fifo", (int)getpid());
  REQUIRE(mkfifo(fifo, 0600) == 0, "mkfifo");
  for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++)
    for (int device = 0; device < 2; device++) {
      snprintf(line, sizeof line, "%s %s", verbs[i], device ? "/dev/zero" : fifo);
      run(line);
      CHECK(o.code > 0 && strstr(o.err, "is not a regular file"), "%s: %d %s", line, o.code, o.err);
    }
  unlink(fifo);
}

TEST(hang_reads_what_kernels_wrote) {
  writeDeviceRecord(0, 2, EP_LL_COMBINE, EP_WAIT_ANNOUNCE, 1);
  writeDeviceRecord(1, 2, EP_LL_COMBINE, EP_WAIT_NONE, -1);
  doctorHang(2, 1,
             "has not come to Combine 5: it has finished Combine 4; rank 0 waits in Combine 5");
  CHECK(!strncmp(o.out, "rank 1 ", 7) && strstr(o.out, "of rank 1 (expected flag 7, received 6)"),
        "%s", o.out);
  /* Of rows the kernels do not tell what they found. */
  writeDeviceRecord(0, 2, EP_LL_COMBINE, EP_WAIT_ROWS, 1);
  doctorHang(2, 1, "for rows of rank 1 (expected flag 7, item 3), for ");
  writeDeviceRecord(0, 2, EP_HT_KIND_COMBINE, EP_WAIT_ROWS, 1);
  doctorHang(2, 1, "for rows of rank 1 (expected flag 7, received 6, item 3), for ");
  writeDeviceRecord(0, 2, EP_HT_KIND_COMBINE, EP_WAIT_CREDIT, 1);
  doctorHang(2, 1, "for room in its FIFO of rank 1 (expected flag 7, received 6), for ");
  for (int i = 0; i < 2; i++) unlink(files[i]);
}

/* Ranks 0 and 1 are a domain, 2 and 3 another: by rails what 3 dispatches comes to 0 through 1. A record with
 * a finished dispatch more or less, and a wait of Dispatch 5 for `peer`, or none. */
static void writeRails(int rank, uint64_t finished, uint32_t phase, int peer, int pid) {
  writeRecord(rank, 4, 0, EP_HANG_IDLE, -1, pid);
  ep_hang_record_t r;
  FILE *f = fopen(files[rank], "r+b");
  if (!f || fread(&r, sizeof r, 1, f) != 1) CHECK(0, "cannot read %s", files[rank]);
  r.ranksPerNode = 2;
  r.device = (ep_hang_device_t){.used = 1, .rails = 1, .finished = {finished, 4, 0}};
  r.device.wait =
      (ep_wait_record_t){.state = phase ? 1 : 0,
                         .kind = EP_LL_DISPATCH,
                         .phase = phase,
                         .rank = peer,
                         .operation = 5,
                         .item = -1,
                         .sinceNs = ((uint64_t)time(NULL) - 5) * 1000000000u + (unsigned)rank};
  if (f && (fseek(f, 0, SEEK_SET) || fwrite(&r, sizeof r, 1, f) != 1))
    CHECK(0, "cannot write %s", files[rank]);
  if (f) fclose(f);
}

static void doctorNames(int rank, const char *words) {
  doctorHang(4, 1, words);
  CHECK(atoi(o.out + strlen("rank ")) == rank, "not rank %d: %s", rank, o.out);
}

TEST(hang_by_rails_tells_the_source_from_the_forwarder) {
  int me = (int)getpid();
  pid_t gone = fork();
  if (gone == 0) _exit(0);
  waitpid(gone, NULL, 0);
  /* All are there; 1 has not come and forwards nothing, which 3 waits for, too. */
  writeRails(0, 4, EP_WAIT_ROUTING, 3, me);
  writeRails(1, 4, EP_WAIT_NONE, -1, me);
  writeRails(2, 5, EP_WAIT_NONE, -1, me);
  writeRails(3, 4, EP_WAIT_ROUTING, 1, me);
  doctorNames(1, "rank 0 waits in Dispatch 5 for routing of rank 3 through rank 1 (");
  /* 3 is through. */
  writeRails(3, 5, EP_WAIT_NONE, -1, me);
  doctorNames(1, "has not come to Dispatch 5");
  /* It has not come; it waits until it may send. */
  writeRails(3, 4, EP_WAIT_NONE, -1, me);
  writeRails(1, 4, EP_WAIT_ROUTING, 3, me);
  doctorNames(3, "has not come to Dispatch 5");
  writeRails(2, 4, EP_WAIT_NONE, -1, me);
  writeRails(3, 4, EP_WAIT_BUFFER, 2, me);
  doctorNames(2, "has not come to Dispatch 5");
  /* One of them is gone. */
  writeRails(1, 4, EP_WAIT_ROUTING, 3, (int)gone);
  writeRails(3, 5, EP_WAIT_NONE, -1, me);
  doctorNames(1, "is gone");
  writeRails(1, 4, EP_WAIT_ROUTING, 3, me);
  writeRails(3, 4, EP_WAIT_NONE, -1, (int)gone);
  doctorNames(3, "is gone");
  for (int i = 0; i < 4; i++) unlink(files[i]);
}

TEST_MAIN()
