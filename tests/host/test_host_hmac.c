/* SHA-256 and HMAC against the standards' own examples, and memory that cannot shrink. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "host_hmac.h"
#include "host_internal.h"
#include "test.h"

static const char *hex(const unsigned char digest[EP_DIGEST_BYTES]) {
  static char text[2 * EP_DIGEST_BYTES + 1];
  for (int i = 0; i < EP_DIGEST_BYTES; i++) snprintf(text + 2 * i, 3, "%02x", digest[i]);
  return text;
}

static const char *sha256(const char *text, size_t bytes, size_t part) {
  unsigned char digest[EP_DIGEST_BYTES];
  ep_sha256_t h;
  epSha256Begin(&h);
  for (size_t at = 0; at < bytes; at += part)
    epSha256Add(&h, text + at, bytes - at < part ? bytes - at : part);
  epSha256End(&h, digest);
  return hex(digest);
}

/* FIPS 180-4's examples (NIST, "SHA256.pdf") and the empty and the long message. */
TEST(sha256_of_the_standard) {
  static const char *const two = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
  static char million[1000000];
  memset(million, 'a', sizeof million);
  for (size_t part = 1; part < 200; part += 7) {
    CHECK(!strcmp(sha256("abc", 3, part),
                  "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
          "abc in parts of %zu", part);
    CHECK(!strcmp(sha256(two, strlen(two), part),
                  "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"),
          "two blocks in parts of %zu", part);
  }
  CHECK(
      !strcmp(sha256("", 0, 1), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
      "nothing");
  CHECK(!strcmp(sha256(million, sizeof million, 999),
                "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
        "a million a");
}

static const char *hmac(const void *key, size_t keyBytes, const void *data, size_t bytes) {
  unsigned char mac[EP_DIGEST_BYTES];
  ep_hmac_t h;
  epHmacBegin(&h, key, keyBytes);
  epHmacAdd(&h, data, bytes);
  epHmacEnd(&h, mac);
  return hex(mac);
}

/* RFC 4231, test cases 1 to 3. */
TEST(hmac_of_the_standard) {
  unsigned char key[20], data[50];
  memset(key, 0x0b, sizeof key);
  CHECK(!strcmp(hmac(key, 20, "Hi There", 8),
                "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
        "case 1");
  CHECK(!strcmp(hmac("Jefe", 4, "what do ya want for nothing?", 28),
                "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
        "case 2");
  memset(key, 0xaa, sizeof key);
  memset(data, 0xdd, sizeof data);
  CHECK(!strcmp(hmac(key, 20, data, 50),
                "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
        "case 3");
}

TEST(bytes_that_differ_anywhere) {
  unsigned char a[32] = {0}, b[32] = {0};
  CHECK(epSameBytes(a, b, 32), "equal");
  for (int i = 0; i < 256; i++) {
    b[i / 8] = (unsigned char)(1 << i % 8);
    CHECK(!epSameBytes(a, b, 32), "bit %d", i);
    b[i / 8] = 0;
  }
}

TEST(memory_that_may_shrink_is_told) {
  int pipes[2], fd = epMemfdNew("test", 8192);
  REQUIRE(fd >= 0, "%s", strerror(errno));
  CHECK(epMemfdHolds(fd, 8192), "its own size");
  CHECK(!epMemfdHolds(fd, 8193), "a byte more");
  CHECK(ftruncate(fd, 4096) && errno == EPERM, "it shrank");
  close(fd);
  fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  CHECK(!ftruncate(fd, 8192) && !epMemfdHolds(fd, 8192), "it can shrink");
  close(fd);
  REQUIRE(!pipe(pipes), "pipe");
  CHECK(!epMemfdHolds(pipes[0], 0) && !epMemfdHolds(-1, 0), "a pipe, and nothing");
  close(pipes[0]);
  close(pipes[1]);
}

/* `ulimit -f` is an error, not a signal. */
TEST(a_limit_of_file_sizes) {
  fflush(NULL);
  pid_t pid = fork();
  if (pid == 0) {
    struct rlimit limit = {4096, 4096};
    setrlimit(RLIMIT_FSIZE, &limit);
    _exit(epMemfdNew("test", 8192) < 0 && errno == EFBIG ? 0 : 1);
  }
  int status = -1;
  waitpid(pid, &status, 0);
  CHECK(status == 0, "status 0x%x", status);
}

TEST_MAIN()
