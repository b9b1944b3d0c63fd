/* Stand-ins for libraries that machines have beside what is needed: by the macro a driver or a CUDA runtime
 * of 12.8, an NCCL of 2.28.9 or 2.32.3, or a CUDA runtime that a framework brought and that finds no GPU. */
#pragma GCC visibility push(default)
int cuDriverGetVersion(int *version);
int cudaRuntimeGetVersion(int *version);
int cudaGetDeviceCount(int *count);
int cudaLaunchHostFunc(void *stream, void *function, void *data);
int ncclGetVersion(int *version);

#if defined(OTHER_DRIVER)
int cuDriverGetVersion(int *version) {
  *version = OTHER_DRIVER;
  return 0;
}
#elif defined(OTHER_NCCL)
int ncclGetVersion(int *version) {
  *version = OTHER_NCCL;
  return 0;
}
#else
int cudaRuntimeGetVersion(int *version) {
  *version = OTHER_RUNTIME;
  return 0;
}
int cudaGetDeviceCount(int *count) {
  *count = 0;
  return 35;
}
int cudaLaunchHostFunc(void *stream, void *function, void *data) {
  return stream || function || data ? 35 : 1;
}
#endif
