// Rows of a matrix times tokens: what the GEMV and the adapters' shrink are made of.
//
// A row's dot product with a token adds up in the same order in every tile, so that the result does not depend on
// which rows and tokens it shares a tile with: a base-only token keeps its bits beside routed ones.
#pragma once
#include <type_traits>
#include "vec.h"

namespace molora {

// How a token is held and one row's weights meet it: fp32 lanes, two chains of additions per row.
template <class Format>
struct Widened {
  using Weight = typename Format::Type;
  using Token = float;
  struct Sum {
    Floats first{}, second{};
  };
  static Pair read(const Weight* p) { return Format::widen(p); }
  static void add(Sum& s, const Pair& w, const Token* x) {
    s.first += w.first * load<Floats>(x);
    s.second += w.second * load<Floats>(x + LANES);
  }
  static float total(const Sum& s) { return sum(s.first + s.second); }
  static void totals(Sum a, Sum b, Sum c, Sum d, float* out) {  // by value: what has an address is not in registers
    sums(a.first + a.second, b.first + b.second, c.first + c.second, d.first + d.second, out);
  }
  template <class T>
  static void lay(const T* x, int64_t n, Token* to) {
    lay_out<Format>(x, n, to);
  }
};

#if defined(__AVX512BF16__)
// The processor's own product of bf16 pairs into fp32; tokens stay bf16.
struct Native {
  using Weight = c10::BFloat16;
  using Token = c10::BFloat16;
  struct Sum {
    __m512 lanes = _mm512_setzero_ps();
  };
  static __m512bh read(const Weight* p) { return (__m512bh)_mm512_loadu_si512(p); }
  static void add(Sum& s, __m512bh w, const Token* x) {
    s.lanes = _mm512_dpbf16_ps(s.lanes, w, (__m512bh)_mm512_loadu_si512(x));
  }
  static float total(const Sum& s) { return _mm512_reduce_add_ps(s.lanes); }
  static void totals(Sum a, Sum b, Sum c, Sum d, float* out) {
    out[0] = total(a), out[1] = total(b), out[2] = total(c), out[3] = total(d);
  }
  template <class T>
  static void lay(const T* x, int64_t n, Token* to) {
    static_assert(std::is_same_v<T, Token>);
    std::memcpy((void*)to, x, n * sizeof(Token));
    std::fill(to + n, to + round_up(n), Token(0));
  }
};
#endif

template <class T>
struct MathOf {
  using Math = Widened<typename FormatOf<T>::Format>;
};
template <>
struct MathOf<int8_t> {
  using Math = Widened<Int8>;
};
#if defined(__AVX512BF16__)
template <>
struct MathOf<c10::BFloat16> {
  using Math = Native;
};
#endif

// What is read next, asked for while the present rows are read: a row is too short for the hardware to run ahead.
// Rows that follow one another are asked for in the order of the addresses, which Zen 3 read faster than row beside
// row; of rows that lie `apart` (in bytes) four go side by side.
struct Ahead {
  const char* from = nullptr;  // null: nothing is known
  int64_t apart = 0;

  Ahead() = default;
  template <class T>
  Ahead(const T* rows, int64_t ld, int64_t n) : from((const char*)rows), apart(ld == n ? 0 : ld * int64_t(sizeof(T))) {}

  // at: how many bytes have been read here, bytes: how many are about to be.
  void ask(int64_t at, int64_t bytes) const {
    if (!from) return;
    for (int64_t line = at / 64; line * 64 < at + bytes; line++)
      __builtin_prefetch(from + (apart ? line % 4 * apart + line / 4 * 64 : line * 64));
  }
};

// out[t * ldo + r] = W[r] . x[t] for ROWS rows and TOKENS tokens. ld, ldx: strides in elements; x is laid out.
template <class Math, int ROWS, int TOKENS>
inline void tile(const typename Math::Weight* W, int64_t ld, const typename Math::Token* x, int64_t ldx, int64_t n,
                 float* out, int64_t ldo, Ahead next) {
  typename Math::Sum sums[ROWS][TOKENS];
  int64_t h = 0;
  // unrolled by order: sums that are not would stand in memory, and each addition wait for its way there and back
  for (; h + STEP <= n; h += STEP) {
    next.ask(ROWS * h * sizeof(*W), ROWS * STEP * sizeof(*W));
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      auto w = Math::read(W + r * ld + h);
#pragma GCC unroll 2
      for (int t = 0; t < TOKENS; t++) Math::add(sums[r][t], w, x + t * ldx + h);
    }
  }
  if (h < n)
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      typename Math::Weight rest[STEP] = {};
      std::memcpy((void*)rest, W + r * ld + h, (n - h) * sizeof(rest[0]));
      auto w = Math::read(rest);
#pragma GCC unroll 2
      for (int t = 0; t < TOKENS; t++) Math::add(sums[r][t], w, x + t * ldx + h);
    }
  if constexpr (ROWS == 4 && TOKENS == 1) {
    Math::totals(sums[0][0], sums[1][0], sums[2][0], sums[3][0], out);
  } else {
    for (int r = 0; r < ROWS; r++)
      for (int t = 0; t < TOKENS; t++) out[t * ldo + r] = Math::total(sums[r][t]);
  }
}

// The same for any number of rows and tokens. after: what is read when these rows are through.
template <class Math>
inline void dots(const typename Math::Weight* W, int64_t ld, int64_t rows, const typename Math::Token* x, int64_t ldx,
                 int64_t tokens, int64_t n, float* out, int64_t ldo, Ahead after = {}) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    const auto* w = W + r * ld;
    Ahead next = r + 4 < rows ? Ahead(w + 4 * ld, ld, n) : after;
    int64_t t = 0;
    for (; t + 2 <= tokens; t += 2) {
      tile<Math, 2, 2>(w, ld, x + t * ldx, ldx, n, out + t * ldo + r, ldo, {w + 2 * ld, ld, n});
      tile<Math, 2, 2>(w + 2 * ld, ld, x + t * ldx, ldx, n, out + t * ldo + r + 2, ldo, next);
    }
    if (t < tokens) tile<Math, 4, 1>(w, ld, x + t * ldx, ldx, n, out + t * ldo + r, ldo, next);
  }
  for (; r < rows; r++)
    for (int64_t t = 0; t < tokens; t++)
      tile<Math, 1, 1>(W + r * ld, ld, x + t * ldx, ldx, n, out + t * ldo + r, ldo, r + 1 == rows ? after : Ahead());
}

// y[o] += sum_r z[r] B[r, o], o in [0, n), for ROWS rows of B at once: y is read and written once for all of them.
template <class Format, int ROWS>
inline void add_rows(const typename Format::Type* B, int64_t ld, const float* z, int64_t n, float* y,
                     Ahead next) {
  int64_t o = 0;
  for (; o + LANES <= n; o += LANES) {
    next.ask(ROWS * o * sizeof(*B), ROWS * LANES * sizeof(*B));
    Floats v = load<Floats>(y + o);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) v += Format::natural(B + r * ld + o) * z[r];
    store(y + o, v);
  }
  for (; o < n; o++)
    for (int r = 0; r < ROWS; r++) y[o] += float(B[r * ld + o]) * z[r];
}

// The same for any number of rows. after: what is read when these rows are through.
template <class Format>
inline void expand(const typename Format::Type* B, int64_t ld, const float* z, int64_t rank, int64_t n, float* y,
                   Ahead after = {}) {
  int64_t r = 0;
  for (; r + 4 <= rank; r += 4) {
    const auto* b = B + r * ld;
    add_rows<Format, 4>(b, ld, z + r, n, y, r + 4 < rank ? Ahead(b + 4 * ld, ld, n) : after);
  }
  for (; r < rank; r++) add_rows<Format, 1>(B + r * ld, ld, z + r, n, y, r + 1 == rank ? after : Ahead());
}

}  // namespace molora
