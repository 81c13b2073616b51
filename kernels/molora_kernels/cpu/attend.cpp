// See attend.h. Every thread takes a range of positions for all heads; their parts are joined at the end, in order.
#include "attend.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "many.h"
#include "threads.h"

namespace molora {

constexpr int64_t PIECE = 64;  // positions at a time: their scores stay in L1

// e^x of lanes, x <= 0: 2^n by the exponent, 2^f on [-0.5, 0.5] by its Taylor polynomial (error below 2e-7).
inline Floats exponential(Floats x) {
  x = x < -87.f ? broadcast(-87.f) : x;
  Floats t = x * 1.44269504f;
  typedef int32_t Ints __attribute__((vector_size(VECTOR_BYTES)));
  Ints n = __builtin_convertvector(t - 0.5f, Ints);  // t <= 0: towards zero is up
  Floats f = (t - __builtin_convertvector(n, Floats)) * 0.69314718f;
  Floats e = 1.f + f * (1.f + f * (0.5f + f * (0.166666667f + f * (0.0416666667f + f * (0.00833333333f + f * 0.00138888889f)))));
  return e * (Floats)((n + 127) << 23);
}

// Rows that are read soon, asked for while others are computed with: a piece is too short for the hardware to run ahead.
template <class T>
[[gnu::always_inline]] inline void ask(const Kept<T>& kept, int64_t head, int64_t position, int64_t rows) {
  for (int64_t p = position; p < position + rows; p++) {
    const char* row = (const char*)(kept.data + head * kept.head + p * kept.row);
    for (int64_t at = 0; at < kept.width * int64_t(sizeof(T)); at += 64) __builtin_prefetch(row + at);
  }
}

// What a thread knows of one query head: the largest score, the sum of e^(score - largest), and the values weighted so.
struct Part {
  float largest = -std::numeric_limits<float>::infinity(), total = 0.f;
};

template <class T>
void attend(const T* q, int64_t heads, int64_t shared, const Kept<T>& K, const Kept<T>& V, int64_t length, float scale,
            T* out, int64_t max_threads) {
  using Math = typename MathOf<T>::Math;
  using Format = typename FormatOf<T>::Format;
  int64_t wide = round_up(K.width), kept = heads / shared;
  std::vector<typename Math::Token> queries(heads * wide);
  for (int64_t h = 0; h < heads; h++) Math::template lay<T>(q + h * K.width, K.width, queries.data() + h * wide);
  int64_t bytes = kept * length * (K.width + V.width) * sizeof(T);
  int64_t threads = std::min<int64_t>(max_threads, 1 + bytes / THREAD_BYTES);
  std::vector<Part> parts(threads * heads);
  std::vector<float> sums(threads * heads * V.width, 0.f);
  int made = 1;

  in_parallel(threads, [&](int id, int count) {
    auto [from, to] = share(length, PIECE, id, count);
    std::vector<float> scores(shared * PIECE);
    std::vector<const typename Math::Token*> query_at(shared);
    std::vector<float*> score_at(shared), sums_at(shared);
    for (int64_t s = 0; s < shared; s++) score_at[s] = scores.data() + s * PIECE;
    if (id == 0) made = count;
    for (int64_t k = 0; k < kept; k++) {
      for (int64_t s = 0; s < shared; s++) {
        query_at[s] = queries.data() + (k * shared + s) * wide;
        sums_at[s] = sums.data() + (id * heads + k * shared + s) * V.width;
      }
      for (int64_t p = from; p < to; p += PIECE) {
        int64_t n = std::min(PIECE, to - p);
        ask(V, k, p, n);
        shrink<Math>(K.data + k * K.head + p * K.row, K.row, n, query_at.data(), shared, K.width, score_at.data());
        if (p + n < to) ask(K, k, p + n, std::min(PIECE, to - p - n));
        else if (k + 1 < kept) ask(K, k + 1, from, std::min(PIECE, to - from));
        for (int64_t s = 0; s < shared; s++) {
          Part& part = parts[id * heads + k * shared + s];
          float *own = score_at[s], *weighted = sums_at[s];
          std::fill(own + n, own + PIECE, -1e30f);
          Floats most = broadcast(part.largest), sum{};
          for (int64_t i = 0; i < n; i += LANES) {
            Floats score = load<Floats>(own + i) * scale;
            most = score > most ? score : most;
          }
          float largest = most[0];
          for (int i = 1; i < LANES; i++) largest = std::max(largest, most[i]);
          for (int64_t i = 0; i < n; i += LANES) {
            Floats weight = exponential(load<Floats>(own + i) * scale - largest);
            store(own + i, weight);
            sum += weight;
          }
          float total = molora::sum(sum);
          float keep = std::exp(part.largest - largest);
          if (keep != 1.f)
            for (int64_t i = 0; i < V.width; i++) weighted[i] *= keep;
          part.total = part.total * keep + total;
          part.largest = largest;
        }
        expand_many<Format>(V.data + k * V.head + p * V.row, V.row, n, score_at.data(), shared, V.width, sums_at.data());
      }
    }
  });

  for (int64_t h = 0; h < heads; h++) {
    float largest = parts[h].largest, total = 0.f;
    for (int t = 1; t < made; t++) largest = std::max(largest, parts[t * heads + h].largest);
    for (int t = 0; t < made; t++) {
      float keep = std::exp(parts[t * heads + h].largest - largest);
      total += keep * parts[t * heads + h].total;
      float* own = sums.data() + (t * heads + h) * V.width;
      if (t == 0 && keep != 1.f)
        for (int64_t i = 0; i < V.width; i++) own[i] *= keep;
      else if (t > 0)
        for (int64_t i = 0; i < V.width; i++) sums[h * V.width + i] += keep * own[i];
    }
    for (int64_t i = 0; i < V.width; i++) out[h * V.width + i] = T(sums[h * V.width + i] / total);
  }
}

#define MOLORA_FOR(T) \
  template void attend<T>(const T*, int64_t, int64_t, const Kept<T>&, const Kept<T>&, int64_t, float, T*, int64_t);
MOLORA_FOR(float)
MOLORA_FOR(c10::BFloat16)
MOLORA_FOR(c10::Half)

}  // namespace molora
