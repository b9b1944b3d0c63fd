/* Two values as one, as CUDA's header of this name has them; the part that the headers here need. */
#ifndef TREFOIL_VECTOR_TYPES_H
#define TREFOIL_VECTOR_TYPES_H

#define TREFOIL_ALIGNED(bytes) __attribute__((aligned(bytes)))
struct TREFOIL_ALIGNED(8) float2 {
  float x, y;
};
struct TREFOIL_ALIGNED(16) double2 {
  double x, y;
};
#ifndef __cplusplus
typedef struct float2 float2;
typedef struct double2 double2;
#endif

#endif
