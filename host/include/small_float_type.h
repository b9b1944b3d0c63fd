/* The C++ type of a 16-bit format, its pair, and what is done with them. cuda_fp16.h and cuda_bf16.h include
 * it with TREFOIL_T, TREFOIL_T2, TREFOIL_RAW, TREFOIL_RAW2, TREFOIL_NARROW and TREFOIL_WIDEN. It has no
 * guard, and undefines them. Arithmetic is f32's, rounded: that is the format's own, rounded once. */
struct __attribute__((aligned(2))) TREFOIL_T {
protected:
  unsigned short __x;

public:
  TREFOIL_T() = default;
  constexpr TREFOIL_T(const TREFOIL_RAW &raw) : __x(raw.x) {}
  TREFOIL_T &operator=(const TREFOIL_RAW &raw) {
    __x = raw.x;
    return *this;
  }
  operator TREFOIL_RAW() const {
    TREFOIL_RAW raw;
    raw.x = __x;
    return raw;
  }
  TREFOIL_T(float f) : __x(TREFOIL_NARROW(static_cast<double>(f), TREFOIL_ROUND_NEAREST)) {}
  TREFOIL_T(double f) : __x(TREFOIL_NARROW(f, TREFOIL_ROUND_NEAREST)) {}
  operator float() const { return TREFOIL_WIDEN(__x); }
  TREFOIL_T &operator=(float f) { return *this = TREFOIL_T(f); }
  TREFOIL_T &operator=(double f) { return *this = TREFOIL_T(f); }
#define TREFOIL_INTEGER(Int)                                                                       \
  TREFOIL_T(Int i) : __x(trefoilFromInt(i)) {}                                                     \
  operator Int() const {                                                                           \
    return trefoilToInt<Int>(TREFOIL_WIDEN(__x));                                                  \
  }                                                                                                \
  TREFOIL_T &operator=(Int i) {                                                                    \
    return *this = TREFOIL_T(i);                                                                   \
  }
  TREFOIL_INTEGER(short)
  TREFOIL_INTEGER(unsigned short)
  TREFOIL_INTEGER(int)
  TREFOIL_INTEGER(unsigned int)
  TREFOIL_INTEGER(long)
  TREFOIL_INTEGER(unsigned long)
  TREFOIL_INTEGER(long long)
  TREFOIL_INTEGER(unsigned long long)
#undef TREFOIL_INTEGER
  operator signed char() const {
    return trefoilToInt<signed char>(TREFOIL_WIDEN(__x));
  }
  operator unsigned char() const {
    return trefoilToInt<unsigned char>(TREFOIL_WIDEN(__x));
  }
  operator char() const {
    return trefoilToInt<char>(TREFOIL_WIDEN(__x));
  }
  constexpr operator bool() const {
    return (__x & 0x7fffu) != 0;
  }

private:
  /* Rounded once: the bits that a double cannot hold only say on which side of a tie the number lies. */
  template <class Int> static unsigned short trefoilFromInt(Int i) {
    const bool negative = i < static_cast<Int>(0);
    unsigned long long magnitude = static_cast<unsigned long long>(i);
    if (negative) magnitude = 0ull - magnitude;
    if (magnitude >> 53)
      magnitude = (magnitude & ~0xffffull) | ((magnitude & 0xffffull) ? 0x8000 : 0);
    const double value = static_cast<double>(magnitude);
    return TREFOIL_NARROW(negative ? -value : value, TREFOIL_ROUND_NEAREST);
  }
};

#define TREFOIL_OPERATOR(op)                                                                       \
  static inline TREFOIL_T operator op(const TREFOIL_T &a, const TREFOIL_T &b) {                    \
    return TREFOIL_T(static_cast<float>(a) op static_cast<float>(b));                              \
  }                                                                                                \
  static inline TREFOIL_T &operator op##=(TREFOIL_T &a, const TREFOIL_T &b) {                      \
    return a = a op b;                                                                             \
  }
TREFOIL_OPERATOR(+)
TREFOIL_OPERATOR(-)
TREFOIL_OPERATOR(*)
TREFOIL_OPERATOR(/)
#undef TREFOIL_OPERATOR
#define TREFOIL_COMPARISON(op, name)                                                               \
  static inline bool operator op(const TREFOIL_T &a, const TREFOIL_T &b) {                         \
    return static_cast<float>(a) op static_cast<float>(b);                                         \
  }                                                                                                \
  TREFOIL_INLINE bool name(const TREFOIL_T a, const TREFOIL_T b) {                                 \
    return a op b;                                                                                 \
  }
TREFOIL_COMPARISON(<, __hlt)
TREFOIL_COMPARISON(>, __hgt)
TREFOIL_COMPARISON(<=, __hle)
TREFOIL_COMPARISON(>=, __hge)
TREFOIL_COMPARISON(==, __heq)
#undef TREFOIL_COMPARISON
/* Of numbers, in CUDA: a NaN differs from nothing for __hne, and from everything for !=. */
static inline bool operator!=(const TREFOIL_T &a, const TREFOIL_T &b) {
  return static_cast<float>(a) != static_cast<float>(b);
}
TREFOIL_INLINE bool __hisnan(const TREFOIL_T a) {
  return static_cast<float>(a) != static_cast<float>(a);
}
TREFOIL_INLINE bool __hne(const TREFOIL_T a, const TREFOIL_T b) {
  return a != b && !__hisnan(a) && !__hisnan(b);
}
TREFOIL_INLINE int __hisinf(const TREFOIL_T a) {
  const float x = a;
  return x > 3.4028234e38f ? 1 : x < -3.4028234e38f ? -1 : 0;
}

static inline TREFOIL_T trefoilFromBits(TREFOIL_T, unsigned bits) {
  TREFOIL_RAW raw;
  raw.x = static_cast<unsigned short>(bits);
  return TREFOIL_T(raw);
}
TREFOIL_INLINE TREFOIL_T __habs(const TREFOIL_T a) {
  return trefoilFromBits(a, __hisnan(a) ? 0x7fff : static_cast<TREFOIL_RAW>(a).x & 0x7fffu);
}
TREFOIL_INLINE TREFOIL_T __hneg(const TREFOIL_T a) {
  return __hisnan(a) ? trefoilFromBits(a, 0x7fff)
                     : trefoilFromBits(a, static_cast<TREFOIL_RAW>(a).x ^ 0x8000u);
}
static inline TREFOIL_T operator+(const TREFOIL_T &a) {
  return a;
}
static inline TREFOIL_T operator-(const TREFOIL_T &a) {
  return __hneg(a);
}
TREFOIL_INLINE TREFOIL_T __hadd(const TREFOIL_T a, const TREFOIL_T b) {
  return a + b;
}
TREFOIL_INLINE TREFOIL_T __hsub(const TREFOIL_T a, const TREFOIL_T b) {
  return a - b;
}
TREFOIL_INLINE TREFOIL_T __hmul(const TREFOIL_T a, const TREFOIL_T b) {
  return a * b;
}
TREFOIL_INLINE TREFOIL_T __hdiv(const TREFOIL_T a, const TREFOIL_T b) {
  return a / b;
}
/* A number rather than a NaN; +0 above -0. */
TREFOIL_INLINE TREFOIL_T __hmax(const TREFOIL_T a, const TREFOIL_T b) {
  if (__hisnan(a)) return __hisnan(b) ? trefoilFromBits(a, 0x7fff) : b;
  if (__hisnan(b) || a > b) return a;
  return a < b || static_cast<TREFOIL_RAW>(a).x == 0x8000u ? b : a;
}
TREFOIL_INLINE TREFOIL_T __hmin(const TREFOIL_T a, const TREFOIL_T b) {
  if (__hisnan(a)) return __hisnan(b) ? trefoilFromBits(a, 0x7fff) : b;
  if (__hisnan(b) || a < b) return a;
  return a > b || static_cast<TREFOIL_RAW>(b).x == 0x8000u ? b : a;
}

struct __attribute__((aligned(4))) TREFOIL_T2 {
  TREFOIL_T x, y;
  TREFOIL_T2() = default;
  TREFOIL_T2(const TREFOIL_T &a, const TREFOIL_T &b) : x(a), y(b) {}
  TREFOIL_T2(const TREFOIL_RAW2 &raw) {
    TREFOIL_RAW low, high;
    low.x = raw.x;
    high.x = raw.y;
    x = low;
    y = high;
  }
  operator TREFOIL_RAW2() const {
    TREFOIL_RAW2 raw;
    raw.x = static_cast<TREFOIL_RAW>(x).x;
    raw.y = static_cast<TREFOIL_RAW>(y).x;
    return raw;
  }
};
#define TREFOIL_OPERATOR(op)                                                                       \
  static inline TREFOIL_T2 operator op(const TREFOIL_T2 &a, const TREFOIL_T2 &b) {                 \
    return TREFOIL_T2(a.x op b.x, a.y op b.y);                                                     \
  }                                                                                                \
  static inline TREFOIL_T2 &operator op##=(TREFOIL_T2 &a, const TREFOIL_T2 &b) {                   \
    return a = a op b;                                                                             \
  }
TREFOIL_OPERATOR(+)
TREFOIL_OPERATOR(-)
TREFOIL_OPERATOR(*)
TREFOIL_OPERATOR(/)
#undef TREFOIL_OPERATOR
TREFOIL_INLINE TREFOIL_T2 __hadd2(const TREFOIL_T2 a, const TREFOIL_T2 b) {
  return a + b;
}
TREFOIL_INLINE TREFOIL_T2 __hsub2(const TREFOIL_T2 a, const TREFOIL_T2 b) {
  return a - b;
}
TREFOIL_INLINE TREFOIL_T2 __hmul2(const TREFOIL_T2 a, const TREFOIL_T2 b) {
  return a * b;
}
TREFOIL_INLINE float __low2float(const TREFOIL_T2 a) {
  return a.x;
}
TREFOIL_INLINE float __high2float(const TREFOIL_T2 a) {
  return a.y;
}
TREFOIL_INLINE TREFOIL_T2 __lowhigh2highlow(const TREFOIL_T2 a) {
  return TREFOIL_T2(a.y, a.x);
}

#undef TREFOIL_T
#undef TREFOIL_T2
#undef TREFOIL_RAW
#undef TREFOIL_RAW2
#undef TREFOIL_NARROW
#undef TREFOIL_WIDEN
