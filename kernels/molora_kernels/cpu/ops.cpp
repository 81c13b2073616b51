// The operators of the CPU backend, as torch sees them. Shapes in molora_kernels/cpu_ops.py.
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include "attend.h"
#include "context.h"
#include "mixture.h"

#ifndef MOLORA_LIBRARY
#define MOLORA_LIBRARY molora_cpu
#endif

namespace molora {
using at::Tensor;
using Maybe = std::optional<Tensor>;

// Up to this many tokens the GEMV's way is taken. A guess: the crossing was not measured.
constexpr int64_t FEW_TOKENS = 16;
// Weights that are widened at a time, so that a large head needs no large copy.
constexpr int64_t WIDENED_AT_A_TIME = 1 << 21;

// A tensor as the kernels read it: rows `stride` elements apart, a row's elements side by side; a copy only where its
// own strides are others. The leading dimensions are flattened.
struct Rows {
  Tensor held;
  int64_t count, width, stride;

  // The rows of a matrix' transpose: no copy and no view where it is stored by columns.
  static Rows columns(const Tensor& t) {
    TORCH_CHECK(t.dim() == 2, "a matrix expected, got ", t.sizes());
    if (t.stride(0) == 1 || t.size(0) <= 1) return Rows(t, t.size(1), t.size(0), t.stride(1));
    return Rows(t.t());
  }

  Rows(const Tensor& t, int64_t count_, int64_t width_, int64_t stride_)
      : held(t), count(count_), width(width_), stride(stride_) {}

  explicit Rows(const Tensor& t) : held(t), width(t.size(-1)) {
    bool together = t.dim() == 2 && (t.stride(1) == 1 || width <= 1);
    if (!together && !t.is_contiguous()) held = t.contiguous();
    count = width ? t.numel() / width : 0;
    stride = together ? t.stride(0) : width;
  }
  template <class T>
  const T* data() const {
    return held.const_data_ptr<T>();
  }
};

// An operator called from inside one may not hand back its own argument: ask for copies only where one is made.
static Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : t.contiguous(); }
static Maybe dense(const Maybe& t) { return t ? Maybe(dense(*t)) : t; }

static int64_t threads() { return at::in_parallel_region() ? 1 : at::get_num_threads(); }

template <class P>
static const P* data(const Maybe& t) {
  return t ? t->const_data_ptr<P>() : nullptr;
}

static bool wanted(const Tensor& t) { return t.requires_grad(); }
static bool wanted(const Maybe& t) { return t && t->requires_grad(); }

// There are no derivatives here: refuse to lose one.
template <class... Tensors>
static void refuse_gradients(const Tensors&... tensors) {
  TORCH_CHECK(!at::GradMode::is_enabled() || !(wanted(tensors) || ...),
              "the CPU operators have no derivative: molora_kernels' functions take the torch twin where one is wanted");
}

// The tensors of a call's adapters and routes, checked and kept alive while the kernels read them.
struct Mixture {
  Rows A, B;  // (R, in), (R, out)
  Tensor extent, scale, slots, gates;
  Maybe out_scale, out_bias;
  int64_t widest = 0, top;

  Mixture(const Tensor& A_, const Tensor& B_, const Tensor& extent_, const Tensor& scale_, const Tensor& slots_,
          const Tensor& gates_, const Maybe& out_scale_, const Maybe& out_bias_, int64_t tokens, int64_t in, int64_t out)
      : A(A_), B(Rows::columns(B_)), extent(dense(extent_)), scale(dense(scale_)), slots(dense(slots_)),
        gates(dense(gates_)), out_scale(dense(out_scale_)), out_bias(dense(out_bias_)), top(slots_.size(-1)) {
    TORCH_CHECK(A.width == in && B.width == out && A.count == B.count, "factors ", A_.sizes(), " and ",
                B_.sizes(), " do not fit a module of ", in, " inputs and ", out, " outputs");
    TORCH_CHECK(slots.dim() == 2 && slots.size(0) == tokens && slots.sizes() == gates.sizes(), "routes ",
                slots.sizes(), " and gates ", gates.sizes(), " are not those of ", tokens, " tokens");
    int64_t count = extent.size(0);
    TORCH_CHECK(extent.dim() == 2 && extent.size(1) == 2 && scale.numel() == count, "extent must be (slots, 2)");
    for (const Maybe& per_slot : {out_scale, out_bias})
      TORCH_CHECK(!per_slot || (per_slot->size(0) == count && per_slot->size(1) == out), "not one row per slot");
    const int64_t* e = extent.const_data_ptr<int64_t>();
    for (int64_t s = 0; s < count; s++) {
      TORCH_CHECK(e[2 * s] >= 0 && e[2 * s + 1] >= 0 && e[2 * s] + e[2 * s + 1] <= A.count, "slot ", s,
                  " reaches beyond the factors");
      widest = std::max(widest, e[2 * s + 1]);
    }
    const int64_t* chosen = slots.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < slots.numel(); i++)
      TORCH_CHECK_INDEX(chosen[i] >= 0 && chosen[i] < count, "slot ", chosen[i], " of ", count);
    // room for more adapters than a token takes costs nothing
    if (tokens == 1)
      while (top > 0 && chosen[top - 1] == 0) top--;
  }

  template <class T>
  Adapters<T> read() const {
    return {A.data<T>(), A.stride, B.data<T>(), B.stride, extent.const_data_ptr<int64_t>(),
            scale.const_data_ptr<float>(), slots.const_data_ptr<int64_t>(), gates.const_data_ptr<float>(),
            top, widest, data<float>(out_scale), data<float>(out_bias)};
  }
};

template <class F>
static auto by_type(at::ScalarType type, const F& call) {
  switch (type) {
    case at::kFloat: return call(float());
    case at::kBFloat16: return call(c10::BFloat16());
    case at::kHalf: return call(c10::Half());
    default: TORCH_CHECK(false, "float32, bfloat16 or float16 expected, got ", type);
  }
}

#if defined(__AVX512BF16__)
static bool fast_product(at::ScalarType type) { return type != at::kHalf; }
#else
static bool fast_product(at::ScalarType type) { return type == at::kFloat; }
#endif

// W x of many tokens in fp32, for processors on which torch multiplies half-width weights slowly.
static Tensor widened_product(const Tensor& x, const Tensor& weight, const Maybe& bias, const Maybe& row_scale) {
  Tensor wide = x.scalar_type() == at::kFloat ? x : x.to(at::kFloat), y = at::empty({x.size(0), weight.size(0)}, wide.options());
  int64_t out = weight.size(0), step = std::max<int64_t>(1, WIDENED_AT_A_TIME / std::max<int64_t>(1, weight.size(1)));
  for (int64_t o = 0; o < out; o += step) {
    int64_t n = std::min(step, out - o);
    Tensor part = y.narrow(1, o, n);
    at::mm_out(part, wide, weight.narrow(0, o, n).to(at::kFloat).t());
  }
  if (row_scale) y.mul_(*row_scale);
  if (bias) y.add_(*bias);
  return y;
}

static Tensor product(const Tensor& x, const Tensor& weight, const Maybe& bias, const Maybe& row_scale,
                      const Mixture* mixture) {
  int64_t in = weight.size(1), out = weight.size(0);
  TORCH_CHECK(x.size(-1) == in, "x has ", x.size(-1), " features, the weight ", in);
  TORCH_CHECK(row_scale ? weight.scalar_type() == at::kChar : weight.scalar_type() == x.scalar_type(),
              "x is ", x.scalar_type(), ", the weight ", weight.scalar_type());
  TORCH_CHECK(!row_scale || (row_scale->numel() == out && row_scale->scalar_type() == at::kFloat),
              "one float32 scale for each of ", out, " rows expected");
  TORCH_CHECK(!bias || (bias->numel() == out && bias->scalar_type() == x.scalar_type()), "a bias of ", out, " ",
              x.scalar_type(), " expected");
  auto sizes = x.sizes().vec();
  sizes.back() = out;
  Rows flat(x);
  Maybe offset = dense(bias), scales = dense(row_scale);
  int64_t N = flat.count;
  if (N == 0 || out == 0) return at::empty(sizes, x.options());
  return by_type(x.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    const T* bias_data = data<T>(offset);
    Adapters<T> adapters;
    if (mixture) adapters = mixture->template read<T>();
    const Adapters<T>* ad = mixture && mixture->top > 0 ? &adapters : nullptr;
    if (N <= FEW_TOKENS) {
      Rows W(weight);
      Tensor y = at::empty(sizes, x.options());
      T* to = y.mutable_data_ptr<T>();
      const T* from = flat.data<T>();
      if (row_scale)
        decode<T, int8_t>(W.data<int8_t>(), W.stride,
                                                 scales->const_data_ptr<float>(), bias_data, from, flat.stride, N,
                                                 in, out, ad, to, threads());
      else
        decode<T, T>(W.data<T>(), W.stride, nullptr, bias_data, from,
                                            flat.stride, N, in, out, ad, to, threads());
      return y;
    }
    bool native = !row_scale && fast_product(x.scalar_type());
    Tensor many = x.dim() == 2 ? x : x.reshape({N, in});
    Tensor y = native ? at::linear(many, weight, bias) : widened_product(many, weight, bias, row_scale);
    y = dense(y);
    if (ad && native)
      add_delta<T, T>(*ad, bias_data, flat.data<T>(), flat.stride, N, in, out, y.mutable_data_ptr<T>(),
                      threads());
    else if (ad)
      add_delta<T, float>(*ad, bias_data, flat.data<T>(), flat.stride, N, in, out,
                          y.mutable_data_ptr<float>(), threads());
    return (native ? y : y.to(x.scalar_type())).view(sizes);
  });
}

static Tensor gemv(const Tensor& x, const Tensor& weight, const Maybe& bias, const Maybe& row_scale) {
  refuse_gradients(x, weight, bias, row_scale);
  return product(x, weight, bias, row_scale, nullptr);
}

static Tensor linear(const Tensor& x, const Tensor& weight, const Maybe& bias, const Maybe& row_scale, const Tensor& A,
                     const Tensor& B, const Tensor& extent, const Tensor& scale, const Tensor& slots,
                     const Tensor& gates, const Maybe& out_scale, const Maybe& out_bias) {
  refuse_gradients(x, weight, bias, row_scale, A, B, scale, gates, out_scale, out_bias);
  int64_t in = weight.size(1), tokens = in ? x.numel() / in : 0;
  Mixture mixture(A, B, extent, scale, slots, gates, out_scale, out_bias, tokens, in, weight.size(0));
  return product(x, weight, bias, row_scale, &mixture);
}

static Tensor delta(const Tensor& y, const Tensor& x, const Maybe& base_bias, const Tensor& A, const Tensor& B,
                    const Tensor& extent, const Tensor& scale, const Tensor& slots, const Tensor& gates,
                    const Maybe& out_scale, const Maybe& out_bias) {
  refuse_gradients(y, x, base_bias, A, B, scale, gates, out_scale, out_bias);
  Rows flat(x);
  Tensor mixed = y.clone(at::MemoryFormat::Contiguous);
  int64_t N = flat.count, in = flat.width, out = y.size(-1);
  TORCH_CHECK(x.scalar_type() == y.scalar_type() && out * N == y.numel(), "x and y do not belong together");
  Mixture mixture(A, B, extent, scale, slots, gates, out_scale, out_bias, N, in, out);
  Maybe bias = dense(base_bias);
  if (N > 0)
    by_type(x.scalar_type(), [&](auto zero) {
      using T = decltype(zero);
      add_delta<T, T>(mixture.read<T>(), data<T>(bias), flat.data<T>(), flat.stride, N, in, out,
                      mixed.mutable_data_ptr<T>(), threads());
    });
  return mixed;
}

// Row `position` of a cache (1, heads, room, width) takes the new token's (1, heads, 1, width).
template <class T>
static Kept<T> put(const Tensor& kept, const Tensor& fresh, int64_t position) {
  TORCH_CHECK(kept.dim() == 4 && fresh.dim() == 4 && kept.size(0) == 1 && fresh.size(0) == 1 && fresh.size(2) == 1 &&
                  kept.size(1) == fresh.size(1) && kept.size(3) == fresh.size(3) && kept.stride(3) == 1 &&
                  kept.scalar_type() == fresh.scalar_type(),
              "new keys or values ", fresh.sizes(), " do not fit the cache ", kept.sizes());
  TORCH_CHECK_INDEX(0 <= position && position < kept.size(2), "position ", position, " of ", kept.size(2));
  Tensor rows = dense(fresh);
  const T* from = rows.const_data_ptr<T>();
  T* to = kept.data_ptr<T>();
  int64_t width = kept.size(3);
  for (int64_t h = 0; h < kept.size(1); h++)
    std::copy(from + h * width, from + (h + 1) * width, to + h * kept.stride(1) + position * kept.stride(2));
  return {to, kept.stride(1), kept.stride(2), width};
}

static Tensor attend_one(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& keys, const Tensor& values,
                         const Tensor& position, double scale) {
  refuse_gradients(q, k, v, keys, values);
  TORCH_CHECK(q.dim() == 4 && q.size(0) == 1 && q.size(2) == 1 && q.size(3) == keys.size(3) && position.numel() == 1 &&
                  q.scalar_type() == keys.scalar_type() && q.size(1) % keys.size(1) == 0 && keys.size(1) == values.size(1),
              "a query ", q.sizes(), " does not fit keys ", keys.sizes());
  int64_t at = *position.const_data_ptr<int64_t>(), heads = q.size(1);
  Tensor query = dense(q), y = at::empty({1, 1, heads, values.size(3)}, q.options());
  by_type(q.scalar_type(), [&](auto zero) {
    using T = decltype(zero);
    auto K = put<T>(keys, k, at), V = put<T>(values, v, at);
    attend<T>(query.const_data_ptr<T>(), heads, heads / keys.size(1), K, V, at + 1, float(scale),
              y.mutable_data_ptr<T>(), threads());
  });
  return y;
}

static Affine affine(const Tensor& weight, const Tensor& bias) {
  TORCH_CHECK(weight.dim() == 2 && bias.numel() == weight.size(0), "a layer of ", weight.sizes(), " with a bias of ",
              bias.sizes());
  return {weight.const_data_ptr<double>(), bias.const_data_ptr<double>(), weight.size(1), weight.size(0)};
}

template <class P, class Read>
static ContextState<P> context_state(const std::vector<Tensor>& held, const Read& at) {
  if (held.size() == 2) return {at(held[0]), at(held[1])};
  return {at(held[0]), at(held[1]), at(held[2]), at(held[3]), at(held[4]),
          at(held[5]), at(held[6]), at(held[7]), at(held[8]), at(held[9])};
}

static std::vector<Tensor> route_context(const Tensor& table, int64_t token, bool cut, at::ArrayRef<double> decays,
                                         double span_decay, int64_t least, at::TensorList net, at::TensorList state) {
  int64_t width = table.size(-1), averages = decays.size();
  bool ahead = net.size() == 8;
  TORCH_CHECK(net.size() == (ahead ? 8 : 4) && state.size() == (ahead ? 10 : 2), "a network of ", net.size(),
              " tensors and a state of ", state.size());
  std::vector<Tensor> own, held, found;
  for (const Tensor& t : net) own.push_back(dense(t));
  for (const Tensor& t : state) held.push_back(dense(t));
  TORCH_CHECK(table.dim() == 2 && table.stride(1) == 1, "a table of ", table.sizes());
  TORCH_CHECK_INDEX(0 <= token && token < table.size(0), "token ", token, " of ", table.size(0));
  const float* row = table.const_data_ptr<float>() + token * table.stride(0);
  std::vector<double> e(row, row + width);
  ContextNet made{affine(own[0], own[1]), affine(own[2], own[3]), {}, {}, decays.data(), width, averages, span_decay, least};
  if (ahead) made.ahead_inner = affine(own[4], own[5]), made.ahead_outer = affine(own[6], own[7]);
  int64_t experts = made.outer.out, features = (1 + averages) * width;
  TORCH_CHECK(made.inner.in == features && made.outer.in == made.inner.out, "the layers do not fit together");
  TORCH_CHECK(!ahead || (made.ahead_inner.in == 3 * width + made.inner.out + 6 * experts && made.ahead_outer.out == experts &&
                         made.ahead_outer.in == made.ahead_inner.out), "the layers that look ahead do not fit");
  const int64_t sizes[] = {averages * width, averages, 1, experts, experts, 1, experts, 3 * experts, width, 1};
  for (size_t i = 0; i < held.size(); i++)
    TORCH_CHECK(held[i].numel() == sizes[i], "part ", i, " of the state has ", held[i].numel(), " elements");
  found.push_back(at::empty({1, 1, features}, own[0].options()));
  found.push_back(at::empty({1, 1, experts}, own[0].options()));
  for (const Tensor& t : held) found.push_back(at::empty(t.sizes(), t.options()));
  std::vector<Tensor> kept(found.begin() + 2, found.end());
  context_step(made, e.data(), cut,
               context_state<const double>(held, [](const Tensor& t) { return t.const_data_ptr<double>(); }),
               context_state<double>(kept, [](const Tensor& t) { return t.mutable_data_ptr<double>(); }),
               found[0].mutable_data_ptr<double>(), found[1].mutable_data_ptr<double>());
  return found;
}

static Tensor route_head(const Tensor& hidden, const Maybe& prior, at::TensorList net) {
  TORCH_CHECK(net.size() == 4, "a head of ", net.size(), " tensors");
  std::vector<Tensor> own;
  for (const Tensor& t : net) own.push_back(dense(t));
  Affine inner = affine(own[0], own[1]), outer = affine(own[2], own[3]);
  Tensor h = dense(hidden);
  Maybe before = dense(prior);
  int64_t d = h.numel(), more = before ? before->numel() : 0;
  TORCH_CHECK(inner.in == d + more && outer.in == inner.out, "a state of ", d, " numbers and ", more,
              " before it do not fit the head");
  std::vector<double> wide(d);
  by_type(h.scalar_type(), [&](auto zero) {
    const auto* from = h.const_data_ptr<decltype(zero)>();
    for (int64_t i = 0; i < d; i++) wide[i] = double(float(from[i]));
  });
  Tensor logp = at::empty({1, 1, outer.out}, own[0].options());
  head_step(inner, outer, wide.data(), d, data<double>(before), logp.mutable_data_ptr<double>());
  return logp;
}

static bool route_choose(const Tensor& logp, int64_t k, double temperature, const Tensor& places, const Tensor& muted,
                         const Tensor& slots, const Tensor& gates, int64_t first, int64_t end) {
  int64_t experts = logp.numel(), width = slots.size(-1);
  TORCH_CHECK(slots.dim() == 3 && slots.size(1) == 1 && slots.sizes() == gates.sizes() && slots.is_contiguous() &&
                  gates.is_contiguous(), "tables of ", slots.sizes(), " and ", gates.sizes());
  TORCH_CHECK_INDEX(0 <= first && first < end && end <= slots.size(0), "layers ", first, " to ", end, " of ", slots.size(0));
  TORCH_CHECK(0 < k && k <= experts && k <= width && places.numel() == experts && muted.numel() == experts &&
                  temperature > 0, k, " of ", experts, " experts at temperature ", temperature);
  Tensor scores = dense(logp), to = dense(places), silent = dense(muted);
  Choice rule{k, temperature, to.const_data_ptr<int64_t>(), silent.const_data_ptr<bool>()};
  int64_t* s = slots.mutable_data_ptr<int64_t>() + first * width;
  float* g = gates.mutable_data_ptr<float>() + first * width;
  if (!choose_step(rule, scores.const_data_ptr<double>(), experts, s, g)) return false;
  std::fill(s + k, s + width, 0);
  std::fill(g + k, g + width, 0.f);
  for (int64_t layer = 1; layer < end - first; layer++) {
    std::copy(s, s + width, s + layer * width);
    std::copy(g, g + width, g + layer * width);
  }
  return true;
}

#define MOLORA_ADAPTERS \
  "Tensor A, Tensor B, Tensor extent, Tensor scale, Tensor slots, Tensor gates, Tensor? out_scale, Tensor? out_bias"

TORCH_LIBRARY(MOLORA_LIBRARY, m) {
  m.def("gemv(Tensor x, Tensor weight, Tensor? bias, Tensor? row_scale) -> Tensor");
  m.def("linear(Tensor x, Tensor weight, Tensor? bias, Tensor? row_scale, " MOLORA_ADAPTERS ") -> Tensor");
  m.def("delta(Tensor y, Tensor x, Tensor? base_bias, " MOLORA_ADAPTERS ") -> Tensor");
  m.def("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor position, float scale) -> Tensor");
  m.def("context(Tensor table, int token, bool cut, float[] decays, float span_decay, int least, Tensor[] net, Tensor[] state) -> Tensor[]");
  m.def(
      "choose(Tensor logp, int k, float temperature, Tensor places, Tensor muted, Tensor(a!) slots, Tensor(b!) gates, "
      "int first, int end) -> bool");
  m.def("head(Tensor hidden, Tensor? prior, Tensor[] net) -> Tensor");
}

TORCH_LIBRARY_IMPL(MOLORA_LIBRARY, CPU, m) {
  m.impl("gemv", &gemv);
  m.impl("linear", &linear);
  m.impl("delta", &delta);
  m.impl("attend", &attend_one);
  m.impl("context", &route_context);
  m.impl("head", &route_head);
  m.impl("choose", &route_choose);
}

}  // namespace molora
