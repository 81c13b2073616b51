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
  using Read = Pair;
  static Read read(const Weight* p) { return Format::widen(p); }
  static Read read(const Weight* p, int64_t count) {  // zero behind count
    Weight rest[STEP] = {};
    std::memcpy((void*)rest, p, count * sizeof(Weight));
    return read(rest);
  }
  static void add(Sum& s, const Read& w, const Token* x) {
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
  using Read = __m512bh;
  static Read read(const Weight* p) { return (Read)_mm512_loadu_si512(p); }
  static Read read(const Weight* p, int64_t count) { return (Read)_mm512_maskz_loadu_epi16((1u << count) - 1, p); }
  static void add(Sum& s, Read w, const Token* x) {
    s.lanes = _mm512_dpbf16_ps(s.lanes, w, (__m512bh)_mm512_loadu_si512(x));
  }
  static float total(const Sum& s) { return sum((Floats)s.lanes); }
  static void totals(Sum a, Sum b, Sum c, Sum d, float* out) {
    sums((Floats)a.lanes, (Floats)b.lanes, (Floats)c.lanes, (Floats)d.lanes, out);
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

// Rows that are read side by side, and whether the hardware runs ahead in them by itself: Zen 5 reads eight so at the
// memory's limit, and slower when it is asked; Zen 3 wants to be asked. Of others this is a guess.
#if defined(__AVX512F__)
constexpr int TOGETHER = 8;
constexpr bool RUNS_AHEAD = true;
#else
constexpr int TOGETHER = 4;
constexpr bool RUNS_AHEAD = false;
#endif

// What is read next, asked for while the present rows are read: a row is too short for the hardware to run ahead.
// Rows that follow one another are asked for in the order of the addresses, which Zen 3 read faster than row beside
// row; of rows that lie `apart` (in bytes) TOGETHER go side by side, as they are read.
struct Ahead {
  const char* from = nullptr;  // null: nothing is known
  int64_t apart = 0;

  Ahead() = default;
  template <class T>
  Ahead(const T* rows, int64_t ld, int64_t n) : from((const char*)rows), apart(ld == n ? 0 : ld * int64_t(sizeof(T))) {}

  // at: how many bytes have been read here; BYTES are about to be. Always inlined: gcc takes a call of what does nothing
  // but prefetch for one without effect, and leaves it out.
  template <int64_t BYTES>
  [[gnu::always_inline]] void ask(int64_t at) const {
    if (apart == 0 && BYTES % 64 == 0) {  // at is a multiple of BYTES
      for (int64_t line = 0; line < BYTES; line += 64) __builtin_prefetch(from + at + line);
      return;
    }
    for (int64_t line = at / 64; line * 64 < at + BYTES; line++)
      __builtin_prefetch(from + (apart ? line % TOGETHER * apart + line / TOGETHER * 64 : line * 64));
  }

  // What lies so many bytes behind, where rows follow one another.
  Ahead beyond(int64_t bytes) const {
    Ahead moved = *this;
    if (from && apart == 0) moved.from += bytes;
    return moved;
  }
};

// Rows of W times tokens: x(t) is where a token lies, out(t) where its ROWS results go, ask(h) runs before a step.
template <class Math, int ROWS, int TOKENS, class X, class Out, class Ask>
[[gnu::always_inline]] inline void products(const typename Math::Weight* W, int64_t ld, int64_t n, X x, Out out, Ask ask) {
  typename Math::Sum sums[ROWS][TOKENS];
  int64_t h = 0;
  // unrolled by order: sums that are not would stand in memory, and each addition wait for its way there and back
  for (; h + STEP <= n; h += STEP) {
    ask(h);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      auto w = Math::read(W + r * ld + h);
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS; t++) Math::add(sums[r][t], w, x(t) + h);
    }
  }
  if (h < n)
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      auto w = Math::read(W + r * ld + h, n - h);
#pragma GCC unroll 4
      for (int t = 0; t < TOKENS; t++) Math::add(sums[r][t], w, x(t) + h);
    }
#pragma GCC unroll 4
  for (int t = 0; t < TOKENS; t++) {
    float* to = out(t);
    if constexpr (ROWS % 4 == 0) {
#pragma GCC unroll 2
      for (int r = 0; r < ROWS; r += 4)
        Math::totals(sums[r][t], sums[r + 1][t], sums[r + 2][t], sums[r + 3][t], to + r);
    } else {
#pragma GCC unroll 2
      for (int r = 0; r < ROWS; r++) to[r] = Math::total(sums[r][t]);
    }
  }
}

// out[t * ldo + r] = W[r] . x[t] for ROWS rows and TOKENS tokens. ld, ldx: strides in elements; x is laid out.
// Never inlined: among a caller's variables gcc keeps its pointers in memory, and rows are read more slowly.
template <class Math, int ROWS, int TOKENS, bool ASKS>
[[gnu::noinline]] void tile_of(const typename Math::Weight* W, int64_t ld, const typename Math::Token* x, int64_t ldx,
                               int64_t n, float* out, int64_t ldo, Ahead next) {
  products<Math, ROWS, TOKENS>(
      W, ld, n, [=](int t) { return x + t * ldx; }, [=](int t) { return out + t * ldo; },
      [=](int64_t h) __attribute__((always_inline)) {
        if constexpr (ASKS) next.ask<ROWS * STEP * sizeof(*W)>(ROWS * h * sizeof(*W));
      });
}

template <class Math, int ROWS, int TOKENS>
inline void tile(const typename Math::Weight* W, int64_t ld, const typename Math::Token* x, int64_t ldx, int64_t n,
                 float* out, int64_t ldo, Ahead next) {
  if (next.from)
    tile_of<Math, ROWS, TOKENS, true>(W, ld, x, ldx, n, out, ldo, next);
  else
    tile_of<Math, ROWS, TOKENS, false>(W, ld, x, ldx, n, out, ldo, next);
}

// The same for any number of rows and tokens. after: what is read when these rows are through.
template <class Math>
inline void dots(const typename Math::Weight* W, int64_t ld, int64_t rows, const typename Math::Token* x, int64_t ldx,
                 int64_t tokens, int64_t n, float* out, int64_t ldo, Ahead after = {}) {
  int64_t r = 0;
  for (; r + TOGETHER <= rows; r += TOGETHER) {
    const auto* w = W + r * ld;
    Ahead next = r + TOGETHER == rows ? after : RUNS_AHEAD ? Ahead() : Ahead(w + TOGETHER * ld, ld, n);
    int64_t t = 0;
    for (; t + 2 <= tokens; t += 2) {
      constexpr int HALF = TOGETHER / 2;
      tile<Math, HALF, 2>(w, ld, x + t * ldx, ldx, n, out + t * ldo + r, ldo,
                          RUNS_AHEAD ? Ahead() : Ahead(w + HALF * ld, ld, n));
      tile<Math, HALF, 2>(w + HALF * ld, ld, x + t * ldx, ldx, n, out + t * ldo + r + HALF, ldo, next);
    }
    if (t < tokens) tile<Math, TOGETHER, 1>(w, ld, x + t * ldx, ldx, n, out + t * ldo + r, ldo, next);
  }
  for (; r < rows; r++)
    for (int64_t t = 0; t < tokens; t++)
      tile<Math, 1, 1>(W + r * ld, ld, x + t * ldx, ldx, n, out + t * ldo + r, ldo, r + 1 == rows ? after : Ahead());
}

// y[o] += sum_r z[r] B[r, o], o in [0, n), for ROWS rows of B at once: y is read and written once for all of them.
template <class Format, int ROWS, bool ASKS>
inline void add_rows_of(const typename Format::Type* B, int64_t ld, const float* z, int64_t n, float* y, Ahead next) {
  int64_t o = 0;
  for (; o + LANES <= n; o += LANES) {
    if constexpr (ASKS) next.ask<ROWS * LANES * sizeof(*B)>(ROWS * o * sizeof(*B));
    Floats v = load<Floats>(y + o);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) v += Format::natural(B + r * ld + o) * z[r];
    store(y + o, v);
  }
  for (; o < n; o++)
    for (int r = 0; r < ROWS; r++) y[o] += float(B[r * ld + o]) * z[r];
}

template <class Format, int ROWS>
inline void add_rows(const typename Format::Type* B, int64_t ld, const float* z, int64_t n, float* y, Ahead next) {
  if (next.from)
    add_rows_of<Format, ROWS, true>(B, ld, z, n, y, next);
  else
    add_rows_of<Format, ROWS, false>(B, ld, z, n, y, next);
}

// The same for any number of rows. after: what is read when these rows are through.
template <class Format>
inline void expand(const typename Format::Type* B, int64_t ld, const float* z, int64_t rank, int64_t n, float* y,
                   Ahead after = {}) {
  int64_t r = 0;
  for (; r + TOGETHER <= rank; r += TOGETHER) {
    const auto* b = B + r * ld;
    add_rows<Format, TOGETHER>(b, ld, z + r, n, y, r + TOGETHER < rank ? Ahead(b + TOGETHER * ld, ld, n) : after);
  }
  for (; r < rank; r++) add_rows<Format, 1>(B + r * ld, ld, z + r, n, y, r + 1 == rank ? after : Ahead());
}

}  // namespace molora
