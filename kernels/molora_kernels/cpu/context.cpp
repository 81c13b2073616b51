// See context.h.
#include "context.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vec.h"

namespace molora {

typedef double Doubles __attribute__((vector_size(VECTOR_BYTES)));
constexpr int64_t WIDE = VECTOR_BYTES / 8;

static void affine(const Affine& f, const double* x, double* y) {
  for (int64_t o = 0; o < f.out; o++) {
    const double* w = f.weight + o * f.in;
    Doubles sums[4] = {};  // side by side: each waits for its own last addition only
    int64_t i = 0;
    for (; i + 4 * WIDE <= f.in; i += 4 * WIDE)
      for (int64_t s = 0; s < 4; s++) sums[s] += load<Doubles>(w + i + s * WIDE) * load<Doubles>(x + i + s * WIDE);
    Doubles both = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double total = f.bias[o];
    for (; i < f.in; i++) total += w[i] * x[i];
    for (int64_t s = 0; s < WIDE; s++) total += both[s];
    y[o] = total;
  }
}

static void gelu(double* x, int64_t n) {
  for (int64_t i = 0; i < n; i++) x[i] = 0.5 * x[i] * (1 + std::erf(x[i] * M_SQRT1_2));
}

// Layer norm without scale and shift, as torch has it (epsilon 1e-5).
static void normalise(const double* x, int64_t n, double* y) {
  double mean = 0, square = 0;
  for (int64_t i = 0; i < n; i++) mean += x[i];
  mean /= n;
  for (int64_t i = 0; i < n; i++) square += (x[i] - mean) * (x[i] - mean);
  double factor = 1 / std::sqrt(square / n + 1e-5);
  for (int64_t i = 0; i < n; i++) y[i] = (x[i] - mean) * factor;
}

// x - log sum exp x
static void log_softmax(const double* x, int64_t n, double* y) {
  double largest = *std::max_element(x, x + n), total = 0;
  for (int64_t i = 0; i < n; i++) total += std::exp(x[i] - largest);
  double shift = largest + std::log(total);
  for (int64_t i = 0; i < n; i++) y[i] = x[i] - shift;
}

// What the spans hold up to this token: into `parts` mean, early, last (5 E), and into `after`.
static void remember(const ContextNet& net, const double* p, const double* own, bool cut,
                     const ContextState<const double>& before, const ContextState<double>& after, double* parts) {
  int64_t experts = net.outer.out, width = net.width;
  double count = cut ? 0 : *before.count, weight = std::pow(net.span_decay, count);
  double weights = (cut ? 0 : *before.weight) + weight;
  bool closes = cut && *before.count >= net.least;
  for (int64_t e = 0; e < experts; e++) {
    double held[] = {before.sum[e] / std::max(*before.count, 1.0),
                     before.early[e] / std::max(*before.weight, std::numeric_limits<double>::min()), before.p[e]};
    for (int64_t part = 0; part < 3; part++)
      after.last[part * experts + e] = closes ? held[part] : before.last[part * experts + e];
    after.sum[e] = (cut ? 0 : before.sum[e]) + p[e];
    after.early[e] = (cut ? 0 : before.early[e]) + p[e] * weight;
    after.p[e] = p[e];
    parts[e] = after.sum[e] / (count + 1);
    parts[experts + e] = after.early[e] / weights;
  }
  std::copy(after.last, after.last + 3 * experts, parts + 2 * experts);
  *after.count = count + 1;
  *after.weight = weights;
  for (int64_t i = 0; i < width; i++) after.opening[i] = cut ? 0 : *before.fresh > 0 ? own[i] : before.opening[i];
  *after.fresh = cut;
}

void context_step(const ContextNet& net, const double* e, bool cut, const ContextState<const double>& before,
                  const ContextState<double>& after, double* features, double* logp) {
  int64_t width = net.width, experts = net.outer.out;
  std::vector<double> average(width);
  normalise(e, width, features);
  for (int64_t d = 0; d < net.averages; d++) {
    double weight = after.weights[d] = 1 + net.decays[d] * before.weights[d];
    for (int64_t i = 0; i < width; i++) {
      double sum = after.sums[d * width + i] = e[i] + net.decays[d] * before.sums[d * width + i];
      average[i] = sum / weight;
    }
    normalise(average.data(), width, features + (1 + d) * width);
  }
  std::vector<double> hidden(net.inner.out), logits(experts);
  affine(net.inner, features, hidden.data());
  gelu(hidden.data(), net.inner.out);
  affine(net.outer, hidden.data(), logits.data());
  if (net.ahead_outer.out) {
    std::vector<double> read(net.ahead_inner.in), units(net.ahead_outer.in), more(experts), p(experts);
    log_softmax(logits.data(), experts, p.data());
    for (double& x : p) x = std::exp(x);
    double* to = std::copy(features, features + 2 * width, read.data());
    to = std::copy(hidden.begin(), hidden.end(), to) + width;
    to = std::copy(p.begin(), p.end(), to);
    remember(net, p.data(), features, cut, before, after, to);
    std::copy(after.opening, after.opening + width, read.data() + 2 * width + net.inner.out);
    affine(net.ahead_inner, read.data(), units.data());
    gelu(units.data(), net.ahead_outer.in);
    affine(net.ahead_outer, units.data(), more.data());
    for (int64_t i = 0; i < experts; i++) logits[i] += more[i];
  }
  log_softmax(logits.data(), experts, logp);
}

void head_step(const Affine& inner, const Affine& outer, const double* h, int64_t d, const double* prior,
               double* logp) {
  std::vector<double> read(inner.in), units(inner.out), logits(outer.out);
  normalise(h, d, read.data());
  if (prior) std::copy(prior, prior + inner.in - d, read.data() + d);
  affine(inner, read.data(), units.data());
  gelu(units.data(), inner.out);
  affine(outer, units.data(), logits.data());
  log_softmax(logits.data(), outer.out, logp);
}

constexpr double GRID = 1.0 / (1 << 30);

bool choose_step(const Choice& rule, const double* logp, int64_t experts, int64_t* slots, float* gates) {
  constexpr double never = -std::numeric_limits<double>::infinity();
  std::vector<double> scores(experts), ranks(experts), parts(rule.k);
  std::vector<int64_t> order(experts);
  for (int64_t e = 0; e < experts; e++) {
    if (std::isnan(logp[e])) return false;
    scores[e] = rule.muted[e] ? never : logp[e] / rule.temperature;
    ranks[e] = std::nearbyint(scores[e] / GRID);
    order[e] = e;
  }
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return ranks[a] > ranks[b]; });
  double best = scores[order[0]], total = 0;
  for (int64_t i = 0; i < rule.k; i++) total += parts[i] = best > never ? std::exp(scores[order[i]] - best) : 1;
  for (int64_t i = 0; i < rule.k; i++) {
    slots[i] = scores[order[i]] > never ? rule.places[order[i]] + 1 : 0;
    gates[i] = parts[i] / total;
  }
  return true;
}

}  // namespace molora
