// Few tokens, for every dtype. Knows no torch: it compiles in seconds.
#include "mixture.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "dots.h"
#include "int8.h"
#include "mix.h"
#include "threads.h"

namespace molora {

constexpr int64_t DECODE_BLOCK = 4096;  // of few tokens together: their sums stay in L1

// Tokens laid out for weights of one format, and rows of such weights times all of them.
template <class Weight>
struct Laid {
  using Math = typename MathOf<Weight>::Math;
  int64_t wide, n, count;
  std::vector<typename Math::Token> values;

  template <class T>
  Laid(const T* x, int64_t ldx, int64_t tokens, int64_t in)
      : wide(round_up(in)), n(in), count(tokens), values(tokens * wide) {
    for (int64_t t = 0; t < count; t++) Math::template lay<T>(x + t * ldx, in, values.data() + t * wide);
  }
  void rows(const Weight* W, int64_t ld, int64_t r, float* out, int64_t ldo, Ahead after) const {
    dots<Math>(W, ld, r, values.data(), wide, count, n, out, ldo, after);
  }
};

#if defined(MOLORA_INT8)
template <>
struct Laid<int8_t> {
  int64_t n, count;
  std::vector<int16_t> values;
  std::vector<float> scales;

  template <class T>
  Laid(const T* x, int64_t ldx, int64_t tokens, int64_t in)
      : n(in), count(tokens), values(tokens * Int8Math::wide(in)), scales(tokens * Int8Math::blocks(in)) {
    for (int64_t t = 0; t < count; t++)
      Int8Math::lay(x + t * ldx, in, values.data() + t * Int8Math::wide(in), scales.data() + t * Int8Math::blocks(in));
  }
  void rows(const int8_t* W, int64_t ld, int64_t r, float* out, int64_t ldo, Ahead after) const {
    int8_dots(W, ld, r, values.data(), scales.data(), count, n, out, ldo, after);
  }
};
#endif

template <class T, class Weight>
void decode(const Weight* W, int64_t ldw, const float* row_scale, const T* bias, const T* x, int64_t ldx, int64_t N,
            int64_t in, int64_t out, const Adapters<T>* ad, T* y, int64_t max_threads) {
  using Own = typename MathOf<T>::Math;
  int64_t choices = ad ? N * ad->top : 0;
  Laid<Weight> tokens(x, ldx, N, in);
  // adapters of another format than W's read the token in another order
  std::optional<Laid<T>> other;
  const Laid<T>* own = nullptr;
  if constexpr (std::is_same_v<Weight, T>) {
    own = &tokens;
  } else if (ad) {
    own = &other.emplace(x, ldx, N, in);
  }
  std::vector<float> z(ad ? choices * ad->widest : 0);
  int64_t threads = std::min<int64_t>(max_threads, 1 + in * out * sizeof(*W) / THREAD_BYTES);

  // outputs at a time: a whole row of B where it fits, because short pieces that lie apart are read slowly
  int64_t most = std::max(BLOCK, DECODE_BLOCK / N);
  // To memory A, W and B are one stream: the last rows of each part ask for the first of the next.
  in_parallel(threads, [&](int id, int count) {
    auto [first, end] = share(out, 4, id, count);
    for (int64_t c = 0; c < choices; c++) {
      auto [from, to] = share(ad->rank(c), 4, id, count);
      if (from == to) continue;
      Ahead after(W + first * ldw, ldw, in);
      if (c + 1 < choices && ad->rank(c + 1))
        after = {ad->down(c + 1) + share(ad->rank(c + 1), 4, id, count).first * ad->lda, ad->lda, in};
      float* own_z = z.data() + c * ad->widest;
      dots<Own>(ad->down(c) + from * ad->lda, ad->lda, to - from, own->values.data() + c / ad->top * own->wide, 0, 1, in,
                own_z + from, 0, after);
      float factor = ad->gates[c] * ad->scale[ad->slots[c]];
      for (int64_t r = from; r < to; r++) own_z[r] *= factor;
    }
    bool waited = choices == 0;
    auto wait = [&] {
      if (!waited) wait_for_all(count);
      waited = true;
    };
    int64_t ld = std::min(most, end - first);
    std::unique_ptr<float[]> block(new float[(N + 1) * std::max<int64_t>(0, ld)]);  // not filled with zeros
    float* plain = block.get() + N * ld;
    for (int64_t o = first; o < end; o += most) {
      int64_t n = std::min(most, end - o);
      Ahead rest = o + n < end ? Ahead(W + (o + n) * ldw, ldw, in) : Ahead();
      tokens.rows(W + o * ldw, ldw, n, block.get(), ld, choices && ad->rank(0) ? Ahead(ad->up(0) + o, ad->ldb, n) : rest);
      wait();
      for (int64_t t = 0; t < N; t++) {
        float* row = block.get() + t * ld;
        if (row_scale)
          for (int64_t i = 0; i < n; i++) row[i] *= row_scale[o + i];
        if (ad && ad->out_scale) std::copy(row, row + n, plain);
        if (bias)
          for (int64_t i = 0; i < n; i++) row[i] += float(bias[o + i]);
        if (ad) mix(*ad, t, z.data() + t * ad->top * ad->widest, o, n, out, plain, row, t + 1 == N ? rest : Ahead());
        narrow(row, n, y + t * out + o);
      }
    }
    wait();  // a thread without outputs has its share of z
  });
}

using c10::BFloat16;
using c10::Half;
#define MOLORA_FOR(T)                                                                                            \
  template void decode<T, T>(const T*, int64_t, const float*, const T*, const T*, int64_t, int64_t, int64_t,     \
                             int64_t, const Adapters<T>*, T*, int64_t);                                          \
  template void decode<T, int8_t>(const int8_t*, int64_t, const float*, const T*, const T*, int64_t, int64_t,    \
                                  int64_t, int64_t, const Adapters<T>*, T*, int64_t);
MOLORA_FOR(float)
MOLORA_FOR(BFloat16)
MOLORA_FOR(Half)

}  // namespace molora
