// The kernels, for every dtype. Knows no torch: it compiles in seconds.
#include "mixture.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "dots.h"
#include "int8.h"
#include "threads.h"

namespace molora {

constexpr int64_t BLOCK = 256;          // outputs at a time of many tokens
constexpr int64_t DECODE_BLOCK = 4096;  // of few tokens together: their sums stay in L1
constexpr int64_t GROUP = 32;           // tokens that one thread takes at a time in add_delta

// What token t's adapters add to outputs first .. first + n. z: (J, widest), gate and scale folded in; plain: W x
// there. after: what is read afterwards.
template <class T>
void mix(const Adapters<T>& ad, int64_t t, const float* z, int64_t first, int64_t n, int64_t out, const float* plain,
         float* y, Ahead after = {}) {
  using Format = typename FormatOf<T>::Format;
  float part[BLOCK];
  for (int64_t j = 0; j < ad.top; j++) {
    int64_t choice = t * ad.top + j, slot = ad.slots[choice];
    if (slot == 0) continue;
    float gate = ad.gates[choice];
    const float* own = z + j * ad.widest;
    const T* up = ad.up(choice) + first;
    if (ad.out_scale) {
      const float* m = ad.out_scale + slot * out + first;
      for (int64_t b = 0; b < n; b += BLOCK) {
        int64_t some = std::min(BLOCK, n - b);
        std::fill(part, part + some, 0.f);
        expand<Format>(up + b, ad.ldb, own, ad.rank(choice), some, part);
        for (int64_t o = 0; o < some; o++) y[b + o] += m[b + o] * part[o] + gate * (m[b + o] - 1.f) * plain[b + o];
      }
    } else {
      bool more = j + 1 < ad.top && ad.rank(choice + 1) > 0;
      expand<Format>(up, ad.ldb, own, ad.rank(choice), n, y, more ? Ahead(ad.up(choice + 1) + first, ad.ldb, n) : after);
    }
    if (ad.out_bias) {
      const float* b = ad.out_bias + slot * out + first;
      for (int64_t o = 0; o < n; o++) y[o] += gate * b[o];
    }
  }
}

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
        for (int64_t i = 0; i < n; i++) y[t * out + o + i] = T(row[i]);
      }
    }
    wait();  // a thread without outputs has its share of z
  });
}

template <class T, class Y>
void add_delta(const Adapters<T>& ad, const T* base_bias, const T* x, int64_t ldx, int64_t N, int64_t in, int64_t out,
               Y* y, int64_t max_threads) {
  using Math = typename MathOf<T>::Math;
  int64_t groups = (N + GROUP - 1) / GROUP, wide = round_up(in);
  in_parallel(std::min(max_threads, groups), [&](int id, int count) {
    std::vector<typename Math::Token> tokens(GROUP * wide);
    std::vector<float> z(GROUP * ad.top * ad.widest);
    std::vector<int64_t> order;
    float row[BLOCK], plain[BLOCK];
    auto [from, to] = share(groups, 1, id, count);
    for (int64_t g = from; g < to; g++) {
      int64_t t0 = g * GROUP, n_tokens = std::min(GROUP, N - t0);
      order.clear();
      for (int64_t c = t0 * ad.top; c < (t0 + n_tokens) * ad.top; c++)
        if (ad.rank(c) > 0) order.push_back(c);
      // equal slots side by side: two tokens share each row of A that is read
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return ad.slots[a] < ad.slots[b]; });
      for (int64_t t = 0; t < n_tokens; t++)
        Math::template lay<T>(x + (t0 + t) * ldx, in, tokens.data() + t * wide);
      for (size_t i = 0; i < order.size();) {
        int64_t c = order[i], rank = ad.rank(c), ta = c / ad.top - t0;
        bool two = i + 1 < order.size() && ad.slots[order[i + 1]] == ad.slots[c];
        int64_t d = two ? order[i + 1] : c, tb = d / ad.top - t0;
        float *za = z.data() + (c - t0 * ad.top) * ad.widest, *zb = z.data() + (d - t0 * ad.top) * ad.widest;
        dots<Math>(ad.down(c), ad.lda, rank, tokens.data() + ta * wide, (tb - ta) * wide, 1 + two, in, za, zb - za);
        float scale = ad.scale[ad.slots[c]];
        for (int64_t r = 0; r < rank; r++) za[r] *= ad.gates[c] * scale;
        for (int64_t r = 0; two && r < rank; r++) zb[r] *= ad.gates[d] * scale;
        i += 1 + two;
      }
      for (int64_t o = 0; o < out; o += BLOCK) {
        int64_t n = std::min(BLOCK, out - o);
        for (int64_t t = 0; t < n_tokens; t++) {
          const int64_t* mine = ad.slots + (t0 + t) * ad.top;
          if (std::all_of(mine, mine + ad.top, [](int64_t slot) { return slot == 0; })) continue;
          Y* to_y = y + (t0 + t) * out + o;
          for (int64_t i = 0; i < n; i++) row[i] = float(to_y[i]);
          if (ad.out_scale)
            for (int64_t i = 0; i < n; i++) plain[i] = row[i] - (base_bias ? float(base_bias[o + i]) : 0.f);
          mix(ad, t0 + t, z.data() + t * ad.top * ad.widest, o, n, out, plain, row);
          for (int64_t i = 0; i < n; i++) to_y[i] = Y(row[i]);
        }
      }
    }
  });
}

using c10::BFloat16;
using c10::Half;
#define MOLORA_FOR(T)                                                                                            \
  template void decode<T, T>(const T*, int64_t, const float*, const T*, const T*, int64_t, int64_t, int64_t,     \
                             int64_t, const Adapters<T>*, T*, int64_t);                                          \
  template void decode<T, int8_t>(const int8_t*, int64_t, const float*, const T*, const T*, int64_t, int64_t,    \
                                  int64_t, int64_t, const Adapters<T>*, T*, int64_t);                            \
  template void add_delta<T, T>(const Adapters<T>&, const T*, const T*, int64_t, int64_t, int64_t, int64_t, T*,  \
                                int64_t);
MOLORA_FOR(float)
MOLORA_FOR(BFloat16)
MOLORA_FOR(Half)
template void add_delta<BFloat16, float>(const Adapters<BFloat16>&, const BFloat16*, const BFloat16*, int64_t, int64_t,
                                         int64_t, int64_t, float*, int64_t);
template void add_delta<Half, float>(const Adapters<Half>&, const Half*, const Half*, int64_t, int64_t, int64_t, int64_t,
                                     float*, int64_t);

}  // namespace molora
