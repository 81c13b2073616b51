// Many tokens, for every dtype: what adapters add to an output that is there. Knows no torch.
#include <algorithm>
#include <vector>

#include "many.h"
#include "mix.h"
#include "threads.h"

namespace molora {

constexpr int64_t GROUP = 128;  // tokens that one thread takes at a time, at most

// The choices of a group of tokens with an adapter behind them, equal slots side by side: they share what is read of A
// and B. A token that names a slot twice is in two runs: within one, sums are read before others are written.
template <class T>
struct Runs {
  const Adapters<T>& ad;
  int64_t first;                // choice of the group
  std::vector<int64_t> order;   // choices, run by run
  std::vector<bool> touched;    // by token of the group: whether anything is added to it
  std::vector<int64_t> number;  // by choice: the run that it belongs to

  Runs(const Adapters<T>& ad_, int64_t tokens) : ad(ad_), touched(tokens), number(tokens * ad_.top) {}

  void sort(int64_t t0, int64_t tokens) {
    first = t0 * ad.top;
    order.clear();
    std::fill(touched.begin(), touched.end(), false);
    for (int64_t c = first; c < first + tokens * ad.top; c++) {
      if (ad.rank(c) == 0) continue;
      const int64_t *of_token = ad.slots + c / ad.top * ad.top, *own = ad.slots + c;
      number[c - first] = *own * ad.top + std::count(of_token, own, *own);
      order.push_back(c);
      touched[token(c)] = true;
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return number[a - first] < number[b - first]; });
  }

  int64_t token(int64_t choice) const { return (choice - first) / ad.top; }

  // work(i, n, choice): n choices from order[i] on are one run, of which `choice` is the first.
  template <class F>
  void each(const F& work) const {
    for (int64_t i = 0, n, all = order.size(); i < all; i += n) {
      for (n = 1; i + n < all && number[order[i + n] - first] == number[order[i] - first]; n++) {
      }
      work(i, n, order[i]);
    }
  }
};

// Tokens t0 .. t0 + tokens one by one: what z says of them, with output scales and biases.
template <class T, class Y>
static void add_each(const Adapters<T>& ad, const T* base_bias, int64_t t0, int64_t tokens, const float* z, int64_t out,
                     Y* y) {
  float row[BLOCK], plain[BLOCK];
  for (int64_t o = 0; o < out; o += BLOCK) {
    int64_t n = std::min(BLOCK, out - o);
    for (int64_t t = 0; t < tokens; t++) {
      const int64_t* mine = ad.slots + (t0 + t) * ad.top;
      if (std::all_of(mine, mine + ad.top, [](int64_t slot) { return slot == 0; })) continue;
      Y* to = y + (t0 + t) * out + o;
      widen(to, n, row);
      if (ad.out_scale)
        for (int64_t i = 0; i < n; i++) plain[i] = row[i] - (base_bias ? float(base_bias[o + i]) : 0.f);
      mix(ad, t0 + t, z + t * ad.top * ad.widest, o, n, out, plain, row);
      narrow(row, n, to);
    }
  }
}

template <class T, class Y>
void add_delta(const Adapters<T>& ad, const T* base_bias, const T* x, int64_t ldx, int64_t N, int64_t in, int64_t out,
               Y* y, int64_t max_threads) {
  using Math = typename MathOf<T>::Math;
  using Format = typename FormatOf<T>::Format;
  using Token = typename Math::Token;
  // as many tokens as there are for each thread, within bounds: the more, the more of them share a slot
  int64_t group = std::clamp((N + max_threads - 1) / max_threads, GROUP / 4, GROUP);
  int64_t groups = (N + group - 1) / group, wide = round_up(in), choices = group * ad.top;
  // a sum of several adapters is rounded once: it stays in fp32 until all are in it
  bool special = ad.out_scale || ad.out_bias, straight = ad.top == 1;
  in_parallel(std::min(max_threads, groups), [&](int id, int count) {
    Runs<T> runs(ad, group);
    std::vector<Token> tokens(group * wide);
    std::vector<float> z(choices * ad.widest), rows(special || straight ? 0 : group * BLOCK);
    // by place in runs.order: a choice's token, its part of z, its outputs
    std::vector<const Token*> x_at(choices);
    std::vector<float*> z_at(choices), row_at(choices);
    std::vector<Y*> y_at(choices);
    auto [from, to] = share(groups, 1, id, count);
    for (int64_t g = from; g < to; g++) {
      int64_t t0 = g * group, n_tokens = std::min(group, N - t0);
      runs.sort(t0, n_tokens);
      for (int64_t t = 0; t < n_tokens; t++)
        if (runs.touched[t]) Math::template lay<T>(x + (t0 + t) * ldx, in, tokens.data() + t * wide);
      for (size_t i = 0; i < runs.order.size(); i++) {
        int64_t t = runs.token(runs.order[i]);
        x_at[i] = tokens.data() + t * wide;
        z_at[i] = z.data() + (runs.order[i] - runs.first) * ad.widest;
        if (!rows.empty()) row_at[i] = rows.data() + t * BLOCK;
        y_at[i] = y + (t0 + t) * out;
      }
      runs.each([&](int64_t i, int64_t n, int64_t choice) {
        int64_t rank = ad.rank(choice);
        shrink<Math>(ad.down(choice), ad.lda, rank, x_at.data() + i, n, in, z_at.data() + i);
        for (int64_t k = i; k < i + n; k++) {
          float factor = ad.gates[runs.order[k]] * ad.scale[ad.slots[choice]];
          for (int64_t r = 0; r < rank; r++) z_at[k][r] *= factor;
        }
      });
      if (special) {
        add_each<T, Y>(ad, base_bias, t0, n_tokens, z.data(), out, y);
      } else if (straight) {
        runs.each([&](int64_t i, int64_t n, int64_t choice) {
          expand_many<Format>(ad.up(choice), ad.ldb, ad.rank(choice), z_at.data() + i, n, out, y_at.data() + i);
        });
      } else {
        for (int64_t o = 0; o < out; o += BLOCK) {
          int64_t width = std::min(BLOCK, out - o);
          for (int64_t t = 0; t < n_tokens; t++)
            if (runs.touched[t]) widen(y + (t0 + t) * out + o, width, rows.data() + t * BLOCK);
          runs.each([&](int64_t i, int64_t n, int64_t choice) {
            expand_many<Format>(ad.up(choice) + o, ad.ldb, ad.rank(choice), z_at.data() + i, n, width, row_at.data() + i);
          });
          for (int64_t t = 0; t < n_tokens; t++)
            if (runs.touched[t]) narrow(rows.data() + t * BLOCK, width, y + (t0 + t) * out + o);
        }
      }
    }
  });
}

using c10::BFloat16;
using c10::Half;
#define MOLORA_FOR(T, Y)                                                                                        \
  template void add_delta<T, Y>(const Adapters<T>&, const T*, const T*, int64_t, int64_t, int64_t, int64_t, Y*, \
                                int64_t);
MOLORA_FOR(float, float)
MOLORA_FOR(BFloat16, BFloat16)
MOLORA_FOR(BFloat16, float)
MOLORA_FOR(Half, Half)
MOLORA_FOR(Half, float)

}  // namespace molora
