// Vectors of floats, and weights of every format widened to them.
//
// One source for all machines: the compiler's own vector types, as wide as the target has registers. A format
// turns STEP consecutive weights into fp32 lanes in an order of its own; `lay_out` puts the token in that
// order once, so that no weight is shuffled in the inner loop.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace molora {

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64;
#elif defined(__AVX2__)
constexpr int VECTOR_BYTES = 32;
#else
constexpr int VECTOR_BYTES = 16;
#endif
constexpr int LANES = VECTOR_BYTES / 4;
constexpr int64_t STEP = 2 * LANES;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t Shorts __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef int8_t Bytes __attribute__((vector_size(VECTOR_BYTES / 4)));

template <class V>
inline V load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }
inline Floats broadcast(float f) { return Floats{} + f; }

// The sum of all lanes: neighbours first, in one order on every machine and in both functions.
inline float sum(Floats v) {
  float lane[LANES];
  std::memcpy(lane, &v, sizeof v);
  for (int n = LANES / 2; n > 0; n /= 2)
    for (int i = 0; i < n; i++) lane[i] = lane[2 * i] + lane[2 * i + 1];
  return lane[0];
}

// The sums of four vectors at once: one by one they take a fifth of the time of a short row.
inline void sums(Floats a, Floats b, Floats c, Floats d, float* out) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#elif defined(__AVX512F__)
  auto halves = [](__m512 p, __m512 q) {  // neighbours of both, added
    return _mm512_add_ps(_mm512_shuffle_ps(p, q, 0x88), _mm512_shuffle_ps(p, q, 0xdd));
  };
  __m512 quarters = halves(halves((__m512)a, (__m512)b), halves((__m512)c, (__m512)d));
  __m128 low = _mm_add_ps(_mm512_castps512_ps128(quarters), _mm512_extractf32x4_ps(quarters, 1));
  __m128 high = _mm_add_ps(_mm512_extractf32x4_ps(quarters, 2), _mm512_extractf32x4_ps(quarters, 3));
  _mm_storeu_ps(out, _mm_add_ps(low, high));
#else
  out[0] = sum(a), out[1] = sum(b), out[2] = sum(c), out[3] = sum(d);
#endif
}

struct Pair {
  Floats first, second;
};

// -- formats: widen(p) reads STEP weights, natural(p) reads LANES of them in order, place(i) is where input i of a
// step stands in the token's layout
struct Fp32 {
  using Type = float;
  static Pair widen(const float* p) { return {load<Floats>(p), load<Floats>(p + LANES)}; }
  static Floats natural(const float* p) { return load<Floats>(p); }
  static int place(int i) { return i; }
};

struct Bf16 {
  using Type = c10::BFloat16;
  // a word holds an even and an odd weight: each is a float's upper half
  static Pair widen(const Type* p) {
    Words both = load<Words>(p);
    return {(Floats)(both << 16), (Floats)(both & 0xffff0000u)};
  }
  static Floats natural(const Type* p) {
    return (Floats)(__builtin_convertvector(load<Shorts>(p), Words) << 16);
  }
  static int place(int i) { return i / 2 + (i % 2) * LANES; }
};

struct Fp16 {
  using Type = c10::Half;
  static Floats natural(const Type* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__AVX2__) && defined(__F16C__)
    return (Floats)_mm256_cvtph_ps(load<__m128i>(p));
#else
    // exponent and fraction as a float that is 2^112 too small, subnormals included; 31 means Inf or NaN
    Words half = __builtin_convertvector(load<Shorts>(p), Words);
    Words size = (half & 0x7fffu) << 13;
    Words value = (Words)((Floats)size * broadcast(0x1p112f));
    Words special = (Words)((half & 0x7c00u) == 0x7c00u);
    value = (special & (size | 0x7f800000u)) | (~special & value);
    return (Floats)(value | ((half & 0x8000u) << 16));
#endif
  }
  static Pair widen(const Type* p) { return {natural(p), natural(p + LANES)}; }
  static int place(int i) { return i; }
};

struct Int8 {
  using Type = int8_t;
  static Floats natural(const Type* p) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p)));
#elif defined(__AVX2__)
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    return __builtin_convertvector(load<Bytes>(p), Floats);
#endif
  }
  // one read for a step: two half as long would keep the reader behind the memory
  static Pair widen(const Type* p) {
#if defined(__AVX512F__)
    __m256i both = load<__m256i>(p);
    return {(Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(both))),
            (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(both, 1)))};
#elif defined(__AVX2__)
    __m128i both = load<__m128i>(p);
    return {(Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(both)),
            (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(both, 8)))};
#else
    return {natural(p), natural(p + LANES)};
#endif
  }
  static int place(int i) { return i; }
};

template <class T>
struct FormatOf;
template <>
struct FormatOf<float> {
  using Format = Fp32;
};
template <>
struct FormatOf<c10::BFloat16> {
  using Format = Bf16;
};
template <>
struct FormatOf<c10::Half> {
  using Format = Fp16;
};

// LANES floats to T, rounded to nearest, ties to even; NaN stays NaN. AVX512-BF16 makes zeros of subnormal numbers.
inline void put(float* to, Floats v) { store(to, v); }
inline void put(c10::BFloat16* to, Floats v) {
#if defined(__AVX512BF16__)
  auto half = _mm512_cvtneps_pbh((__m512)v);
#else
  Words bits = (Words)v;
  Words number = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  Words none = (Words)((bits & 0x7fffffffu) > 0x7f800000u);
  Shorts half = __builtin_convertvector((none & 0x7fc0u) | (~none & number), Shorts);
#endif
  std::memcpy((void*)to, &half, sizeof half);
}
inline void put(c10::Half* to, Floats v) {
#if defined(__AVX512F__)
  auto half = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy((void*)to, &half, sizeof half);
#elif defined(__AVX2__) && defined(__F16C__)
  auto half = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  std::memcpy((void*)to, &half, sizeof half);
#else
  for (int i = 0; i < LANES; i++) to[i] = c10::Half(v[i]);
#endif
}

// n numbers from one type to another, one of which is float.
template <class T>
inline void narrow(const float* from, int64_t n, T* to) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) put(to + i, load<Floats>(from + i));
  for (; i < n; i++) to[i] = T(from[i]);
}
template <class T>
inline void widen(const T* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, FormatOf<T>::Format::natural(from + i));
  for (; i < n; i++) to[i] = float(from[i]);
}

inline int64_t round_up(int64_t n) { return (n + STEP - 1) / STEP * STEP; }

// One token in the order that `Format` widens its weights to: `to` has round_up(n) floats, zero behind n.
template <class Format, class T>
void lay_out(const T* x, int64_t n, float* to) {
  int64_t whole = n / STEP * STEP;
  for (int64_t h = 0; h < whole; h += STEP)
    for (int i = 0; i < STEP; i++) to[h + Format::place(i)] = float(x[h + i]);
  if (whole == n) return;
  for (int i = 0; i < STEP; i++) to[whole + Format::place(i)] = whole + i < n ? float(x[whole + i]) : 0.f;
}

}  // namespace molora
