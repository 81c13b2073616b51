// Rows of int8 weights times tokens, in integers: half the instructions of widening each weight to a float, which is
// what keeps a core from reading them as fast as it can.
//
// A token is held as 16-bit integers with a scale for every BLOCK inputs: its rounding, 2^-16 of the largest input of a
// block, is far below that of the weights. 32-bit sums of a block cannot overflow: BLOCK * 127 * 32767 < 2^31.
#pragma once
#include <cmath>
#include "dots.h"

namespace molora {

#if defined(__AVX512BW__) || (defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__))
#define MOLORA_INT8 1
struct Int8Math {
  using Weight = int8_t;
  static constexpr int64_t STEP16 = VECTOR_BYTES / 2, BLOCK = 256;
  // Tiles of four rows between what is asked for and what is read: rows are short, one is too few for Zen 5.
  static constexpr int64_t LEAD = VECTOR_BYTES == 64 ? 4 : 1;
  static_assert(BLOCK * 127.0 * 32767.0 < 2147483648.0);

  // Sizes of a held token: its values, rounded up to whole steps, and its blocks' scales.
  static int64_t wide(int64_t n) { return (n + STEP16 - 1) / STEP16 * STEP16; }
  static int64_t blocks(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

  template <class T>
  static void lay(const T* x, int64_t n, int16_t* to, float* scales) {
    for (int64_t b = 0; b * BLOCK < n; b++) {
      const T* from = x + b * BLOCK;
      int64_t count = std::min(BLOCK, n - b * BLOCK);
      float largest = 0;
      for (int64_t i = 0; i < count; i++) largest = std::max(largest, std::fabs(float(from[i])));
      // NaN and Inf make every output NaN: the scale holds it, by which all sums are multiplied
      bool finite = true;
      for (int64_t i = 0; i < count; i++) finite = finite && std::isfinite(float(from[i]));
      scales[b] = finite ? largest / 32767 : std::nanf("");
      float back = finite && largest > 0 ? 32767 / largest : 0;
      for (int64_t i = 0; i < count; i++) to[b * BLOCK + i] = int16_t(std::lrintf(float(from[i]) * back));
    }
    std::fill(to + n, to + wide(n), int16_t(0));
  }

  // A step of weights (or the first `count` of one), and sums of their products with inputs, two neighbours to a lane.
#if defined(__AVX512BW__)
  using Ints = __m512i;
  static Ints read(const int8_t* w) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)w)); }
  static Ints add(Ints sum, Ints w, Ints x) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sum, w, x);
#else
    return _mm512_add_epi32(sum, _mm512_madd_epi16(w, x));
#endif
  }
  static Floats scaled(Ints sum, float scale, Floats to) {
    return (Floats)_mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_set1_ps(scale), (__m512)to);
  }
#else
  using Ints = __m256i;
  static Ints read(const int8_t* w) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)w)); }
  static Ints add(Ints sum, Ints w, Ints x) { return _mm256_add_epi32(sum, _mm256_madd_epi16(w, x)); }
  static Floats scaled(Ints sum, float scale, Floats to) {
    return (Floats)_mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_set1_ps(scale), (__m256)to);
  }
#endif
  static Ints read(const int8_t* w, int64_t count) {
    int8_t rest[STEP16] = {};
    std::memcpy(rest, w, count);
    return read(rest);
  }
};

// out[r] = W[r] . x for ROWS rows and one token. Unrolled by order: sums that are not would stand in memory, not in
// registers, and each addition wait for the last one's way there and back.
template <int ROWS, bool ASKS>
inline void int8_rows_of(const int8_t* W, int64_t ld, const int16_t* x, const float* scales, int64_t n, float* out,
                         Ahead next) {
  using Ints = Int8Math::Ints;
  Floats total[ROWS] = {};
  for (int64_t first = 0, b = 0; first < n; first += Int8Math::BLOCK, b++) {
    Ints sum[ROWS] = {};
    int64_t h = first, end = std::min(n, first + Int8Math::BLOCK);
    for (; h + Int8Math::STEP16 <= end; h += Int8Math::STEP16) {
      if constexpr (ASKS) next.ask<ROWS * Int8Math::STEP16>(ROWS * h);
      Ints token = load<Ints>(x + h);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) sum[r] = Int8Math::add(sum[r], Int8Math::read(W + r * ld + h), token);
    }
    if (h < end) {
      Ints token = load<Ints>(x + h);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) sum[r] = Int8Math::add(sum[r], Int8Math::read(W + r * ld + h, end - h), token);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) total[r] = Int8Math::scaled(sum[r], scales[b], total[r]);
  }
  if constexpr (ROWS % 4 == 0) {
#pragma GCC unroll 2
    for (int r = 0; r < ROWS; r += 4) sums(total[r], total[r + 1], total[r + 2], total[r + 3], out + r);
  } else {
    for (int r = 0; r < ROWS; r++) out[r] = molora::sum(total[r]);
  }
}

template <int ROWS>
inline void int8_rows(const int8_t* W, int64_t ld, const int16_t* x, const float* scales, int64_t n, float* out,
                      Ahead next) {
  if (next.from)
    int8_rows_of<ROWS, true>(W, ld, x, scales, n, out, next);
  else
    int8_rows_of<ROWS, false>(W, ld, x, scales, n, out, next);
}

// The same for any number of rows and tokens: out[t * ldo + r]. after: as for `dots`.
inline void int8_dots(const int8_t* W, int64_t ld, int64_t rows, const int16_t* x, const float* scales, int64_t tokens,
                      int64_t n, float* out, int64_t ldo, Ahead after) {
  int64_t wide = Int8Math::wide(n), blocks = Int8Math::blocks(n);
  for (int64_t t = 0; t < tokens; t++) {
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
      int64_t lead = r + 4 * Int8Math::LEAD;
      Ahead next = lead < rows ? Ahead(W + lead * ld, ld, n) : t + 1 == tokens ? after.beyond((lead - rows) * ld) : Ahead();
      int8_rows<4>(W + r * ld, ld, x + t * wide, scales + t * blocks, n, out + t * ldo + r, next);
    }
    for (; r < rows; r++)
      int8_rows<1>(W + r * ld, ld, x + t * wide, scales + t * blocks, n, out + t * ldo + r, {});
  }
}
#endif

}  // namespace molora
