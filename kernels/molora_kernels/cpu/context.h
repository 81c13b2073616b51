// One token through the small networks of routers, in float64: what a few hundred calls of torch would do, each on a
// few numbers. Formulas: molora_cli/core/router/context.py, spans.py and taps.py, their torch twins.
#pragma once
#include <cstdint>

namespace molora {

// y (out) = W x + b, W (out, in) row by row.
struct Affine {
  const double *weight, *bias;
  int64_t in, out;
};

struct ContextNet {
  Affine inner, outer;              // features -> hidden units -> logits over E experts
  Affine ahead_inner, ahead_outer;  // of the part that looks ahead; ahead_outer.out = 0: there is none
  const double* decays;             // (D,)
  int64_t width, averages;          // p and D
  double span_decay;                // of what a span began with
  int64_t least;                    // tokens of a span that is worth remembering
};

// What is kept from token to token: sums (D, p) and weights (D) of the averages, and of the spans: count, weight,
// fresh (1), sum, early, p (E), last (3 E), opening (p). The pointers of the spans are null where nothing looks ahead.
template <class P>
struct ContextState {
  P *sums, *weights, *count, *sum, *early, *weight, *p, *last, *opening, *fresh;
};

// e (p): the token's projected vector; cut: whether it begins a span. Writes features ((1 + D) p), logp (E) and the
// state after the token.
void context_step(const ContextNet& net, const double* e, bool cut, const ContextState<const double>& before,
                  const ContextState<double>& after, double* features, double* logp);

// A head on a hidden state h (d): log-probabilities (E) of outer gelu(inner [LN(h), prior]). prior: (E) or null.
void head_step(const Affine& inner, const Affine& outer, const double* h, int64_t d, const double* prior, double* logp);

// Which of a stage's experts a token takes: the k best of logp / temperature, equal ones on a grid in their order.
struct Choice {
  int64_t k;
  double temperature;
  const int64_t* places;  // (E) adapter of each expert, -1 = the base
  const bool* muted;      // (E)
};

// logp (E) to slots and gates (k): softmax over the k best, slot = adapter + 1; what scores -inf is slot 0 at gate 0, or
// each at gate 1 / k where nothing else is left. False, and nothing is written, where a score is no number. The twin is
// RouterStack.choose.
bool choose_step(const Choice& rule, const double* logp, int64_t experts, int64_t* slots, float* gates);

}  // namespace molora
