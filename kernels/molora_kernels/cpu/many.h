// What adapters add to many tokens: tiles of tokens that chose the same slot, so that a factor that is read serves
// several of them.
#pragma once
#include "dots.h"

namespace molora {

// A tile of A's rows and tokens: as many sums as the registers hold.
constexpr int SHRINK_ROWS = VECTOR_BYTES == 64 ? 4 : 2;
template <class Math>
constexpr int SHRINK_TOKENS = VECTOR_BYTES == 64 && sizeof(typename Math::Sum) == VECTOR_BYTES ? 4 : 2;
// A tile of tokens and vectors of outputs.
constexpr int EXPAND_TOKENS = VECTOR_BYTES == 64 ? 4 : 2;
constexpr int EXPAND_VECTORS = 4;

// z[t][r] = A[r] . x[t] for ROWS rows and TOKENS tokens, wherever they lie.
template <class Math, int ROWS, int TOKENS>
[[gnu::noinline]] void gathered(const typename Math::Weight* A, int64_t lda, const typename Math::Token* const* x,
                                int64_t n, float* const* z, int64_t first) {
  products<Math, ROWS, TOKENS>(
      A, lda, n, [=](int t) { return x[t]; }, [=](int t) { return z[t] + first; }, [](int64_t) {});
}

template <class Math, int TOKENS>
inline void shrink_some(const typename Math::Weight* A, int64_t lda, int64_t rank, const typename Math::Token* const* x,
                        int64_t n, float* const* z) {
  int64_t r = 0;
  for (; r + SHRINK_ROWS <= rank; r += SHRINK_ROWS)
    gathered<Math, SHRINK_ROWS, TOKENS>(A + r * lda, lda, x, n, z, r);
  for (; r < rank; r++) gathered<Math, 1, TOKENS>(A + r * lda, lda, x, n, z, r);
}

// z[t][r] = A[r] . x[t] for `count` tokens of one slot.
template <class Math>
void shrink(const typename Math::Weight* A, int64_t lda, int64_t rank, const typename Math::Token* const* x,
            int64_t count, int64_t n, float* const* z) {
  constexpr int MOST = SHRINK_TOKENS<Math>;
  int64_t t = 0;
  for (; t + MOST <= count; t += MOST) shrink_some<Math, MOST>(A, lda, rank, x + t, n, z + t);
  if constexpr (MOST > 2)
    if (count - t == 3) return shrink_some<Math, 3>(A, lda, rank, x + t, n, z + t);
  for (; t + 2 <= count; t += 2) shrink_some<Math, 2>(A, lda, rank, x + t, n, z + t);
  if (t < count) shrink_some<Math, 1>(A, lda, rank, x + t, n, z + t);
}

// y[t][o] += sum_r z[t][r] B[r, o] for TOKENS tokens and VECTORS vectors of outputs: read and written once.
template <class Format, int TOKENS, int VECTORS, class Y>
inline void spread(const typename Format::Type* B, int64_t ldb, int64_t rank, const float* const* z, Y* const* y,
                   int64_t o) {
  Floats sums[TOKENS][VECTORS];
#pragma GCC unroll 4
  for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) sums[t][v] = FormatOf<Y>::Format::natural(y[t] + o + v * LANES);
  for (int64_t r = 0; r < rank; r++) {
    const auto* row = B + r * ldb + o;
    Floats b[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) b[v] = Format::natural(row + v * LANES);
#pragma GCC unroll 4
    for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; v++) sums[t][v] += b[v] * z[t][r];
  }
#pragma GCC unroll 4
  for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) put(y[t] + o + v * LANES, sums[t][v]);
}

template <class Format, int TOKENS, class Y>
inline void expand_some(const typename Format::Type* B, int64_t ldb, int64_t rank, const float* const* z, int64_t n,
                        Y* const* y) {
  int64_t o = 0;
  for (; o + EXPAND_VECTORS * LANES <= n; o += EXPAND_VECTORS * LANES)
    spread<Format, TOKENS, EXPAND_VECTORS>(B, ldb, rank, z, y, o);
  for (; o + LANES <= n; o += LANES) spread<Format, TOKENS, 1>(B, ldb, rank, z, y, o);
  for (int t = 0; t < TOKENS; t++)
    for (int64_t i = o; i < n; i++) {
      float sum = float(y[t][i]);
      for (int64_t r = 0; r < rank; r++) sum += float(B[r * ldb + i]) * z[t][r];
      y[t][i] = Y(sum);
    }
}

// y[t][o] += sum_r z[t][r] B[r, o], o in [0, n), for `count` tokens of one slot.
template <class Format, class Y>
void expand_many(const typename Format::Type* B, int64_t ldb, int64_t rank, const float* const* z, int64_t count,
                 int64_t n, Y* const* y) {
  int64_t t = 0;
  for (; t + EXPAND_TOKENS <= count; t += EXPAND_TOKENS)
    expand_some<Format, EXPAND_TOKENS>(B, ldb, rank, z + t, n, y + t);
  if constexpr (EXPAND_TOKENS > 2) {
    if (count - t == 3) return expand_some<Format, 3>(B, ldb, rank, z + t, n, y + t);
    if (count - t == 2) return expand_some<Format, 2>(B, ldb, rank, z + t, n, y + t);
  }
  if (t < count) expand_some<Format, 1>(B, ldb, rank, z + t, n, y + t);
}

}  // namespace molora
