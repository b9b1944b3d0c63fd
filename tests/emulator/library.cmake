# libnccl_ep_emulated.so: the GPU library (api/gpu and the kernels) over the host runtime, so that programs written
# for libnccl_ep.so.0 run here with the GPU's own code path: TREFOIL_LIBRARY, `trefoil check --library`, LD_PRELOAD.
# As with the CPU library the host runtime plays NCCL and CUDA; TREFOIL_HOST_SMS=3 keeps launches small.
set_target_properties(emulated_kernels PROPERTIES POSITION_INDEPENDENT_CODE ON)
set_source_files_properties(${CMAKE_SOURCE_DIR}/api/gpu/gpu_device.cu PROPERTIES LANGUAGE CXX
  COMPILE_OPTIONS "-x;c++")
add_library(emulated_gpu_device OBJECT ${CMAKE_SOURCE_DIR}/api/gpu/gpu_device.cu)
set_target_properties(emulated_gpu_device PROPERTIES POSITION_INDEPENDENT_CODE ON)
target_link_libraries(emulated_gpu_device PRIVATE emulator_flags Boost::context)

# numerics_scalar.c: what the emulated conversions call.
file(GLOB gpu_sources ${CMAKE_SOURCE_DIR}/api/gpu/*.c)
trefoil_objects(emulated_api_gpu SOURCES ${gpu_sources} ${CMAKE_SOURCE_DIR}/ref/numerics_scalar.c
  ${CMAKE_SOURCE_DIR}/ref/grad_config.c)
target_include_directories(emulated_api_gpu PRIVATE ${CMAKE_SOURCE_DIR}/host/include)

add_library(nccl_ep_emulated SHARED $<TARGET_OBJECTS:ep_plan_core> $<TARGET_OBJECTS:ep_round>
  $<TARGET_OBJECTS:ep_net_rendezvous> $<TARGET_OBJECTS:ep_net_engine> $<TARGET_OBJECTS:ep_api>
  $<TARGET_OBJECTS:emulated_api_gpu> $<TARGET_OBJECTS:emulated_gpu_device>
  $<TARGET_OBJECTS:emulated_kernels>)
target_link_options(nccl_ep_emulated PRIVATE
  -Wl,--version-script=${CMAKE_SOURCE_DIR}/include/nccl_ep.map -Wl,-z,defs)
target_link_libraries(nccl_ep_emulated PRIVATE trefoil_flags Boost::context trefoil_host
  Threads::Threads rt m)
set_target_properties(nccl_ep_emulated PROPERTIES LINK_DEPENDS ${CMAKE_SOURCE_DIR}/include/nccl_ep.map)

# The same programs as on GPUs, call by call, over it.
add_library(emulated_calls_steps OBJECT ../api/step.c ../api/step_calls.c)
target_compile_options(emulated_calls_steps PRIVATE
  -include ${CMAKE_SOURCE_DIR}/tests/calls/pinned.h)
add_library(emulated_calls OBJECT ../api/team.c ${CMAKE_SOURCE_DIR}/plan/routing.c)
foreach(objects emulated_calls_steps emulated_calls)
  target_link_libraries(${objects} PRIVATE trefoil_flags)
  target_include_directories(${objects} PRIVATE ${CMAKE_SOURCE_DIR}/tests/api
    ${CMAKE_SOURCE_DIR}/tests ${CMAKE_SOURCE_DIR}/host/include)
endforeach()
foreach(program gpu_calls gpu_captures gpu_memory gpu_tensors gpu_async_errors)
  add_executable(${program}_emulated ../calls/${program}.c $<TARGET_OBJECTS:emulated_calls>
    $<TARGET_OBJECTS:emulated_calls_steps> $<TARGET_OBJECTS:ep_plan_core> $<TARGET_OBJECTS:ep_ref>)
  target_compile_definitions(${program}_emulated PRIVATE TREFOIL_EMULATED_RANKS=3)
  target_include_directories(${program}_emulated PRIVATE ${CMAKE_SOURCE_DIR}/tests/calls
    ${CMAKE_SOURCE_DIR}/tests/api ${CMAKE_SOURCE_DIR}/tests ${CMAKE_SOURCE_DIR}/host/include)
  target_link_libraries(${program}_emulated PRIVATE trefoil_flags nccl_ep_emulated trefoil_host
    Threads::Threads m rt)
  add_test(NAME ${program}_emulated COMMAND ${program}_emulated)
  set_tests_properties(${program}_emulated PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 900 LABELS slow
    ENVIRONMENT TREFOIL_HOST_SMS=3)
endforeach()

# Tensors in wrong memory, when the library is asked to look.
add_executable(tensors_emulated ../api/test_tensors.c ../api/team.c)
target_compile_definitions(tensors_emulated PRIVATE EMULATED)
target_include_directories(tensors_emulated PRIVATE ${CMAKE_SOURCE_DIR}/tests/api
  ${CMAKE_SOURCE_DIR}/tests ${CMAKE_SOURCE_DIR}/host/include)
target_link_libraries(tensors_emulated PRIVATE trefoil_flags nccl_ep_emulated trefoil_host
  Threads::Threads)
add_test(NAME tensors_emulated COMMAND tensors_emulated)
set_tests_properties(tensors_emulated PROPERTIES TIMEOUT 120 LABELS cpu
  ENVIRONMENT "TREFOIL_HOST_SMS=3;NCCL_EP_CHECK_TENSORS=1")

# Several NVLink domains: what the library says with and without GIN between them.
trefoil_test(domains SOURCES test_domains.c LIBS nccl_ep_emulated trefoil_host)
set_tests_properties(domains PROPERTIES ENVIRONMENT TREFOIL_HOST_SMS=3)

# Puts that are under way when a group ends.
add_executable(undrained_emulated test_undrained.c $<TARGET_OBJECTS:emulated_calls>
  $<TARGET_OBJECTS:emulated_calls_steps> $<TARGET_OBJECTS:ep_plan_core> $<TARGET_OBJECTS:ep_ref>)
target_include_directories(undrained_emulated PRIVATE ${CMAKE_SOURCE_DIR}/tests/calls
  ${CMAKE_SOURCE_DIR}/tests/api ${CMAKE_SOURCE_DIR}/tests ${CMAKE_SOURCE_DIR}/host/include)
target_link_libraries(undrained_emulated PRIVATE trefoil_flags nccl_ep_emulated trefoil_host
  Threads::Threads m rt ${CMAKE_DL_LIBS})
add_test(NAME undrained_emulated COMMAND undrained_emulated)
set_tests_properties(undrained_emulated PROPERTIES TIMEOUT 120 LABELS cpu
  ENVIRONMENT "TREFOIL_HOST_SMS=4;NCCL_LSA_TEAM_SIZE=1;TREFOIL_EMULATOR_SLOWER=1")

# A device communicator that cannot be made on one rank.
add_executable(far_start_emulated test_far_start.c $<TARGET_OBJECTS:emulated_calls>
  $<TARGET_OBJECTS:emulated_calls_steps> $<TARGET_OBJECTS:ep_plan_core> $<TARGET_OBJECTS:ep_ref>)
target_include_directories(far_start_emulated PRIVATE ${CMAKE_SOURCE_DIR}/tests/calls
  ${CMAKE_SOURCE_DIR}/tests/api ${CMAKE_SOURCE_DIR}/tests ${CMAKE_SOURCE_DIR}/host/include)
target_link_libraries(far_start_emulated PRIVATE trefoil_flags nccl_ep_emulated trefoil_host
  Threads::Threads m rt ${CMAKE_DL_LIBS})
add_test(NAME far_start_emulated COMMAND far_start_emulated)
set_tests_properties(far_start_emulated PROPERTIES TIMEOUT 120 LABELS cpu
  ENVIRONMENT "TREFOIL_HOST_SMS=4;NCCL_LSA_TEAM_SIZE=1")

# By rails: a dead source, and a dead rank that forwards.
if(TREFOIL_CLI)
  add_executable(forwarder_emulated test_forwarder.c $<TARGET_OBJECTS:emulated_calls>
    $<TARGET_OBJECTS:emulated_calls_steps> $<TARGET_OBJECTS:ep_plan_core> $<TARGET_OBJECTS:ep_ref>)
  target_include_directories(forwarder_emulated PRIVATE ${CMAKE_SOURCE_DIR}/tests/calls
    ${CMAKE_SOURCE_DIR}/tests/api ${CMAKE_SOURCE_DIR}/tests ${CMAKE_SOURCE_DIR}/host/include)
  target_link_libraries(forwarder_emulated PRIVATE trefoil_flags nccl_ep_emulated trefoil_host
    Threads::Threads m rt)
  add_test(NAME forwarder_emulated COMMAND forwarder_emulated)
  set_tests_properties(forwarder_emulated PROPERTIES TIMEOUT 300 LABELS cpu ENVIRONMENT
    "TREFOIL=$<TARGET_FILE:trefoil_cli>;TREFOIL_HOST_SMS=4;NCCL_LSA_TEAM_SIZE=2;NCCL_EP_LL_DISPATCH=rails;TREFOIL_EMULATOR_SLOWER=${slower};TREFOIL_EMULATOR_CLOCK=cpu")
  if(TREFOIL_SANITIZE) # 30 s a scene there
    set_tests_properties(forwarder_emulated PROPERTIES LABELS slow)
  endif()
endif()

# Ranks that share a GPU, a process each: of the command, and of a launcher where NCCL is told to allow it.
if(TREFOIL_CLI)
  set(of_emulated --library $<TARGET_FILE:nccl_ep_emulated> --nccl $<TARGET_FILE:trefoil_host> --cuda $<TARGET_FILE:trefoil_host>)
  set(launched bash ${CMAKE_SOURCE_DIR}/tests/validate/launched.sh $<TARGET_FILE:trefoil_cli> 2 check)
  add_test(NAME shared_gpu_emulated COMMAND trefoil_cli check --ranks 2-3 --cases 12 --seed 3 --gpu-cases ${of_emulated})
  set_tests_properties(shared_gpu_emulated PROPERTIES PASS_REGULAR_EXPRESSION
    "12 cases agree, .*ranks shared 1 GPU, a process each")
  add_test(NAME shared_gpu_launched COMMAND ${launched} --cases 12 --seed 3 --gpu-cases ${of_emulated})
  set_tests_properties(shared_gpu_launched PROPERTIES PASS_REGULAR_EXPRESSION
    "12 cases agree, .*ranks shared 1 GPU, a process each")
  add_test(NAME shared_gpu_refused COMMAND ${launched} --cases 1 --seed 3)
  set_tests_properties(shared_gpu_refused PROPERTIES PASS_REGULAR_EXPRESSION "NCCL_MULTI_RANK_GPU_ENABLE=1 lets them share")
  set_tests_properties(shared_gpu_emulated shared_gpu_launched shared_gpu_refused PROPERTIES LABELS cpu TIMEOUT 300
    ENVIRONMENT "TREFOIL_HOST_SMS=6;TREFOIL_HOST_DEVICES=1")
  add_test(NAME no_shared_files_emulated COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/check_no_shared_files.sh
    $<TARGET_FILE:trefoil_cli> $<TARGET_FILE:nccl_ep_emulated> $<TARGET_FILE:trefoil_host>)
  set_tests_properties(no_shared_files_emulated PROPERTIES SKIP_RETURN_CODE 77 LABELS cpu TIMEOUT 300
    ENVIRONMENT "TREFOIL_HOST_SMS=6;TREFOIL_HOST_DEVICES=1")
  set_tests_properties(shared_gpu_launched PROPERTIES
    ENVIRONMENT "TREFOIL_HOST_SMS=6;TREFOIL_HOST_DEVICES=1;NCCL_MULTI_RANK_GPU_ENABLE=1")
endif()

# What the command says of memory against what a group takes; the CPU library's is in tests/api.
add_executable(memory_need_emulated ../api/test_memory_need.c ../api/team.c
  ${CMAKE_SOURCE_DIR}/cli/memory_need.c ${CMAKE_SOURCE_DIR}/api/gpu/gpu_sizing.c
  ${CMAKE_SOURCE_DIR}/kernels/ll/ll_layout.c ${CMAKE_SOURCE_DIR}/kernels/ll/ll_relay_layout.c
  ${CMAKE_SOURCE_DIR}/kernels/ht/ht_layout.c ${CMAKE_SOURCE_DIR}/kernels/ht/ht_far_layout.c
  $<TARGET_OBJECTS:ep_plan_core>)
target_compile_definitions(memory_need_emulated PRIVATE EMULATED)
target_include_directories(memory_need_emulated PRIVATE ${CMAKE_SOURCE_DIR}/tests/api
  ${CMAKE_SOURCE_DIR}/tests ${CMAKE_SOURCE_DIR}/host/include)
target_link_libraries(memory_need_emulated PRIVATE trefoil_flags nccl_ep_emulated trefoil_host
  Threads::Threads)
add_test(NAME memory_need_emulated COMMAND memory_need_emulated)
set_tests_properties(memory_need_emulated PROPERTIES TIMEOUT 120 LABELS cpu
  ENVIRONMENT TREFOIL_HOST_SMS=5)

# A2SGD's calls.
foreach(subject grad_gpu grad_sync)
  trefoil_test(${subject} SOURCES test_${subject}.c OBJECTS ep_plan ep_ref LIBS ${TREFOIL_JANSSON_LIBS} ${TREFOIL_LIBZIP_LIBS}
    nccl_ep_emulated trefoil_host)
  target_include_directories(test_${subject} PRIVATE ${CMAKE_SOURCE_DIR}/host/include)
  set_tests_properties(${subject} PROPERTIES ENVIRONMENT "TREFOIL_HOST_SMS=3;TREFOIL_EMULATOR_SLOWER=100")
endforeach()

# How many kernels a call launches.
trefoil_test(launches SOURCES test_launches.c LIBS nccl_ep_emulated trefoil_host)
target_include_directories(test_launches PRIVATE ${CMAKE_SOURCE_DIR}/host/include ${CMAKE_SOURCE_DIR}/host)
set_tests_properties(launches PROPERTIES ENVIRONMENT "TREFOIL_HOST_SMS=132;TREFOIL_HOST_DEVICES=2")

# What high throughput with eager sizing waits for, copies and makes.
trefoil_test(eager_calls SOURCES test_eager_calls.c LIBS nccl_ep_emulated trefoil_host ${CMAKE_DL_LIBS})
target_include_directories(test_eager_calls PRIVATE ${CMAKE_SOURCE_DIR}/host/include)
set_tests_properties(eager_calls PROPERTIES ENVIRONMENT TREFOIL_HOST_SMS=3)

# A few random cases of both modes against the reference, and the kernels' byte counters against the plan.
if(TREFOIL_CLI)
  set(few 12)
  if(TREFOIL_SANITIZE)
    set(few 4)
  endif()
  foreach(mode ll ht)
    add_test(NAME check_${mode}_emulated COMMAND trefoil_cli check --gpu-cases --modes ${mode} --ranks 1-3
      --cases ${few} --count-bytes --library $<TARGET_FILE:nccl_ep_emulated> --nccl $<TARGET_FILE:trefoil_host>
      --cuda $<TARGET_FILE:trefoil_host>)
    set_tests_properties(check_${mode}_emulated PROPERTIES TIMEOUT 300 LABELS cpu
      PASS_REGULAR_EXPRESSION "${few} cases agree.*counted by the library as sent" ENVIRONMENT TREFOIL_HOST_SMS=3)
  endforeach()
  add_test(NAME check_a2sgd_emulated COMMAND trefoil_cli check --gpu-cases --modes a2sgd --ranks 1-3 --cases 24
    --library $<TARGET_FILE:nccl_ep_emulated> --nccl $<TARGET_FILE:trefoil_host> --cuda $<TARGET_FILE:trefoil_host>)
  set_tests_properties(check_a2sgd_emulated PROPERTIES TIMEOUT 300 LABELS cpu
    PASS_REGULAR_EXPRESSION "24 cases agree" ENVIRONMENT TREFOIL_HOST_SMS=3)
  # Several NVLink domains, over a network with delays: in CI a few cases (seed 6: of at most 2 tokens), in the long
  # tier many. Sanitizers take the small ones only. Limits are real time, and the machine may have other work.
  function(trefoil_check_domains name mode ranks per cases seed label)
    add_test(NAME check_domains_${name}_emulated COMMAND trefoil_cli check --gpu-cases --modes ${mode} --ranks ${ranks}
      --ranks-per-node ${per} --cases ${cases} --seed ${seed} --timeout-ms 100000 --count-bytes --library $<TARGET_FILE:nccl_ep_emulated>
      --nccl $<TARGET_FILE:trefoil_host> --cuda $<TARGET_FILE:trefoil_host>)
    set_tests_properties(check_domains_${name}_emulated PROPERTIES TIMEOUT 3600 LABELS ${label}
      PASS_REGULAR_EXPRESSION "${cases} cases? agrees?.*counted by the library as sent.*puts between NVLink domains, least for the rows in .*dispatch [0-9]+ .*signals" ENVIRONMENT
      "TREFOIL_HOST_SMS=4;TREFOIL_NET_LATENCY_NS=20000;TREFOIL_NET_JITTER_NS=100000")
  endfunction()
  trefoil_check_domains(pairs ll 2 1 12 6 cpu)
  trefoil_check_domains(ht_pairs ht 2 1 12 6 cpu)
  # Eight ranks: two domains of four, and a domain each.
  set(eight 4)
  if(TREFOIL_SANITIZE)
    set(eight 1)
  endif()
  foreach(mode ll ht)
    trefoil_check_domains(${mode}_two_of_four ${mode} 8 4 ${eight} 6 cpu)
    trefoil_check_domains(${mode}_eight_of_one ${mode} 8 1 ${eight} 6 cpu)
    set_tests_properties(check_domains_${mode}_two_of_four_emulated check_domains_${mode}_eight_of_one_emulated PROPERTIES
      ENVIRONMENT "TREFOIL_HOST_SMS=8;TREFOIL_NET_LATENCY_NS=20000;TREFOIL_NET_JITTER_NS=100000")
  endforeach()
  # The benchmark shows an operation's puts, too: the least in low latency, more where rings are in the way.
  if(NOT TREFOIL_SANITIZE)
    add_test(NAME bench_domains_emulated COMMAND trefoil_cli bench --mode ll --ranks 4 --ranks-per-node 2 --hidden 64 --experts 8
      --topk 2 --tokens 6 --repeats 1 --seconds 0 ${of_emulated})
    set_tests_properties(bench_domains_emulated PROPERTIES TIMEOUT 300 LABELS cpu ENVIRONMENT TREFOIL_HOST_SMS=8
      PASS_REGULAR_EXPRESSION "combine .*puts between NVLink domains, least for the rows in ..: dispatch 8 .8., combine 8 .8., weights 0 .0., ids 0 .0.")
  endif()
  # A rank that nothing gets to is an error of the library in the last call, too, not a difference.
  add_test(NAME check_lost_rank_emulated COMMAND trefoil_cli check --gpu-cases --modes ll --ranks 2 --ranks-per-node 1 --seed 6
    --case 2 --timeout-ms 3000 ${of_emulated})
  set_tests_properties(check_lost_rank_emulated PROPERTIES TIMEOUT 300 LABELS cpu
    PASS_REGULAR_EXPRESSION "ABORTS.*ncclEpUpdateHandle: rank 0 did not answer within 3 s" ENVIRONMENT
    "TREFOIL_HOST_SMS=4;TREFOIL_NET_DEAD_RANK=1:0;TREFOIL_EMULATOR_SLOWER=1")
  if(NOT TREFOIL_SANITIZE)
    # Puts that overtake each other: a signal must not count those before it.
    trefoil_check_domains(ht_reordered ht 2 1 24 1 slow)
    set_tests_properties(check_domains_ht_reordered_emulated PROPERTIES ENVIRONMENT
      "TREFOIL_HOST_SMS=8;TREFOIL_NET_LATENCY_NS=20000;TREFOIL_NET_JITTER_NS=100000;TREFOIL_NET_REORDER_PPM=300000;TREFOIL_NET_REORDER_NS=5000000")
    trefoil_check_domains(quads ll 4 2 6 1 slow)
    trefoil_check_domains(rails ll 4 2 6 1 slow)
    trefoil_check_domains(ht_quads ht 4 2 10 7 slow)
    set(by_rails check_domains_rails_emulated)
  endif()
  trefoil_check_domains(pairs_many ll 2 1 300 1 long)
  trefoil_check_domains(quads_many ll 4 2 120 1 long)
  trefoil_check_domains(rails_many ll 4 2 120 1 long)
  set_tests_properties(${by_rails} check_domains_rails_many_emulated PROPERTIES ENVIRONMENT
    "TREFOIL_HOST_SMS=4;TREFOIL_NET_LATENCY_NS=20000;TREFOIL_NET_JITTER_NS=100000;NCCL_EP_LL_DISPATCH=rails")
  trefoil_check_domains(trios_many ll 3 1 120 1 long)
  trefoil_check_domains(ht_pairs_many ht 2 1 300 1 long)
  trefoil_check_domains(ht_quads_many ht 4 2 120 1 long)
  trefoil_check_domains(ht_trios_many ht 3 1 120 1 long)
  trefoil_check_domains(ht_six_many ht 6 2 40 1 long)
endif()
