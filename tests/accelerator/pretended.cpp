// A device for PyTorch (PrivateUse1) whose tensors are not the CPU's, but that computes
// with the CPU's kernels. Every operation goes through `fallback`: its tensors are seen
// as the CPU's, in the same memory, and what comes out is the device's again. What is
// below `by hand` has no kernel of the CPU's that fits, or must be told of (copies).
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/NativeFunctions.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <atomic>
#include <set>

using at::Tensor;
using c10::IValue;
static constexpr auto DEV = c10::DeviceType::PrivateUse1;
static const c10::Device device0(DEV, 0);

// Whether float64 is refused, as by MPS.
static std::atomic<bool> no_double{false};
static void check_dtype(c10::ScalarType dtype) {
  TORCH_CHECK_TYPE(!no_double || dtype != at::kDouble, "Cannot convert a tensor to float64 on ", device0, ", which doesn't support float64");
}

// ---------------------------------------------------------------- memory
static std::atomic<int64_t> held{0}, peak{0};
static void count(int64_t bytes) {
  int64_t now = held += bytes, top = peak;
  while (now > top && !peak.compare_exchange_weak(top, now)) {}
}
struct Block { at::DataPtr cpu; int64_t bytes; };
static void free_block(void* p) { auto* b = static_cast<Block*>(p); held -= b->bytes; delete b; }
static at::DataPtr on_device(at::DataPtr cpu, int64_t bytes) {
  void* p = cpu.get();
  count(bytes);
  return {p, new Block{std::move(cpu), bytes}, free_block, device0};
}
struct Alloc final : c10::Allocator {
  at::DataPtr allocate(size_t n) override { return on_device(c10::GetAllocator(at::kCPU)->allocate(n), n); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, size_t n) const override { default_copy_data(d, s, n); }
};
static Alloc alloc;
REGISTER_ALLOCATOR(DEV, &alloc);

// ---------------------------------------------------------------- generators, hooks, guard
struct Generator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit Generator(at::Generator g)
      : c10::GeneratorImpl(device0, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu(std::move(g)) {}
  void set_current_seed(uint64_t s) override { cpu.set_current_seed(s); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offsets"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& s) override { cpu.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(cpu.clone()); }
};
static at::Generator make_generator() { return at::make_generator<Generator>(at::make_generator<at::CPUGeneratorImpl>()); }
static at::Generator& default_generator() { static at::Generator g = make_generator(); return g; }
static at::Generator make_for(c10::DeviceIndex) { return make_generator(); }
REGISTER_GENERATOR_PRIVATEUSE1(make_for)  // where torch is too old to ask the hooks

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }  // no override: torch 2.6 has none
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return device0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return make_generator(); }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    at::DataPtr fresh = alloc.allocate(n);
    std::memcpy(fresh.get(), s.data(), std::min(n, s.nbytes()));
    auto* impl = s.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(n);
  }
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return DEV; }
  c10::Device exchangeDevice(c10::Device) const override { return device0; }
  c10::Device getDevice() const override { return device0; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device0); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, device0); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return s; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// ---------------------------------------------------------------- what is watched
static py::object* watcher = nullptr;  // called with (kind, op, bytes)
static std::atomic<bool> watched{false};
static void tell(const char* kind, const std::string& op, int64_t bytes) {
  if (!watched || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  if (watcher) (*watcher)(kind, op, bytes);
}

static py::object* on_assert = nullptr;
static void asserted(const std::string& op, const std::string& text) {
  py::gil_scoped_acquire gil;
  if (on_assert) (*on_assert)(op, text);
}

// ---------------------------------------------------------------- the fallback
static bool there(const Tensor& t) { return t.defined() && t.device().type() == DEV; }

static Tensor aliased(const Tensor& t) {
  const auto& s = t.storage();
  auto* keep = new c10::Storage(s);
  at::DataPtr p(s.mutable_data(), keep, [](void* q) { delete static_cast<c10::Storage*>(q); }, at::Device(at::kCPU));
  c10::Storage cpu(c10::Storage::use_byte_size_t(), s.nbytes(), std::move(p), c10::GetAllocator(at::kCPU), true);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(cpu), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  return out;
}
static Tensor wrapped(const Tensor& cpu) {  // a CPU kernel's fresh result
  check_dtype(cpu.scalar_type());
  auto keep = cpu.storage();
  auto* own = new c10::Storage(keep);
  at::DataPtr p(keep.mutable_data(), own, [](void* q) { delete static_cast<c10::Storage*>(q); }, at::Device(at::kCPU));
  c10::Storage s(c10::Storage::use_byte_size_t(), keep.nbytes(), on_device(std::move(p), keep.nbytes()), &alloc, true);
  auto out = at::detail::make_tensor<c10::TensorImpl>(std::move(s), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), cpu.dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
  return out;
}

// 0-dim CPU tensors are taken, as on CUDA, by pointwise operations and a few others.
static bool takes_numbers(const c10::OperatorHandle& op) {
  static const std::set<std::string> others{
      "aten::_index_put_impl_", "aten::index_put_", "aten::masked_fill_", "aten::index_fill_", "aten::fill_",
      "aten::where", "aten::floor_divide", "aten::remainder", "aten::fmod", "aten::bitwise_right_shift", "aten::bitwise_left_shift", "aten::_amp_foreach_non_finite_check_and_unscale_"};
  return op.hasTag(at::Tag::pointwise) || others.count(op.schema().name());
}
// What makes CUDA wait beside .item() and copies: a size or an error that the host must know.
static bool waits(const c10::OperatorHandle& op) {
  static const std::set<std::string> others{
      "aten::equal", "aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_eig", "aten::linalg_lstsq",
      "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::nonzero", "aten::masked_select",
      "aten::multinomial", "aten::bincount", "aten::repeat_interleave", "aten::_ctc_loss"};
  return op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) || others.count(op.schema().name());
}

struct Call {
  const c10::OperatorHandle& op;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // device, cpu
  bool numbers, indices = false;
  Tensor down(const Tensor& t) {
    if (!t.defined()) return t;
    if (!there(t)) {
      TORCH_CHECK(t.device().is_cpu(), op.schema().name(), ": a tensor on ", t.device());
      if (indices) { tell("up, awaited", op.schema().name(), t.nbytes()); return t; }
      TORCH_CHECK(t.dim() == 0 && numbers, "Expected all tensors to be on the same device, but got one on cpu and others on ",
                  device0, " (", op.schema().name(), ", shape ", t.sizes(), ")");
      return t;
    }
    for (auto& [d, c] : pairs) if (d.is_same(t)) return c;
    TORCH_CHECK(t.layout() == at::kStrided, op.schema().name(), ": layout ", t.layout(), " is not on this device");
    pairs.emplace_back(t, aliased(t));
    return pairs.back().second;
  }
  IValue down(const IValue& v, const c10::TypePtr& type) {
    if (v.isTensor()) return down(v.toTensor());
    if (v.isTensorList()) {
      c10::List<Tensor> out;
      for (const Tensor& t : v.toTensorVector()) out.push_back(down(t));
      return out;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> out;
      for (const std::optional<Tensor>& t : v.toOptionalTensorVector()) out.push_back(t ? std::optional<Tensor>(down(*t)) : t);
      return out;
    }
    if (v.isDevice() && v.toDevice().type() == DEV) return IValue(at::Device(at::kCPU));
    if (v.isGenerator()) {
      auto g = v.toGenerator();
      TORCH_CHECK(g.device().type() == DEV, "Expected a '", device0, "' device type for generator but found '", g.device(), "'");
      return static_cast<Generator*>(g.unsafeGetGeneratorImpl())->cpu;
    }
    if (v.isNone() && type->kind() == c10::OptionalType::Kind &&
        type->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::GeneratorType::Kind)
      return static_cast<Generator*>(default_generator().unsafeGetGeneratorImpl())->cpu;
    return v;
  }
  Tensor up(const Tensor& t) {
    if (!t.defined()) return t;
    for (auto& [d, c] : pairs) if (c.is_same(t)) return d;
    for (auto& [d, c] : pairs)
      if (c.has_storage() && t.has_storage() && c.storage().is_alias_of(t.storage())) {  // a view
        auto out = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(d.storage()), d.key_set(), t.dtype());
        out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
        return out;
      }
    return wrapped(t);
  }
  IValue up(const IValue& v) {
    if (v.isTensor()) return up(v.toTensor());
    if (v.isTensorList()) {
      c10::List<Tensor> out;
      for (const Tensor& t : v.toTensorVector()) out.push_back(up(t));
      return out;
    }
    return v;
  }
  void settle() {  // what was resized
    for (auto& [d, c] : pairs) {
      if (c.storage().data() != d.storage().data() || c.storage().nbytes() != d.storage().nbytes()) {
        auto* keep = new c10::Storage(c.storage());
        at::DataPtr p(keep->mutable_data(), keep, [](void* q) { delete static_cast<c10::Storage*>(q); }, at::Device(at::kCPU));
        auto* impl = d.storage().unsafeGetStorageImpl();
        impl->set_data_ptr_noswap(on_device(std::move(p), c.storage().nbytes()));
        impl->set_nbytes(c.storage().nbytes());
      }
      if (c.sizes() != d.sizes() || c.strides() != d.strides())
        d.unsafeGetTensorImpl()->set_sizes_and_strides(c.sizes(), c.strides(), c.storage_offset());
    }
  }
};

static void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  size_t n = schema.arguments().size();
  std::vector<IValue> args(stack->end() - n, stack->end());
  torch::jit::drop(*stack, n);
  Call call{op, {}, takes_numbers(op)};
  bool indexing = schema.name() == "aten::index" || schema.name() == "aten::_index_put_impl_";  // CPU indices are taken
  if (waits(op)) tell("wait", schema.name(), 0);
  for (size_t i = 0; i < n; i++) {
    call.indices = indexing && i == 1;
    torch::jit::push(*stack, call.down(args[i], schema.arguments()[i].type()));
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    } catch (const c10::Error& error) {  // values that a GPU meets in a kernel: its context is lost
      std::string text = error.what_without_backtrace();
      if (text.find("out of range") != text.npos || text.find("out of bounds") != text.npos) asserted(schema.name(), text);
      throw;
    }
  }
  call.settle();
  size_t m = schema.returns().size();
  std::vector<IValue> results(stack->end() - m, stack->end());
  torch::jit::drop(*stack, m);
  for (auto& r : results) torch::jit::push(*stack, call.up(r));
}

// ---------------------------------------------------------------- by hand
static Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  check_dtype(c10::dtype_or_default(dtype));
  return Tensor(at::detail::empty_strided_generic(size, stride, &alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                                  c10::dtype_or_default(dtype)));
}
static Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                    std::optional<at::Device>, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(layout.value_or(at::kStrided) == at::kStrided, "layout is not on this device");
  check_dtype(c10::dtype_or_default(dtype));
  return Tensor(at::detail::empty_generic(size, &alloc, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                          c10::dtype_or_default(dtype), format));
}
struct Zeros final : c10::Allocator {
  at::DataPtr allocate(size_t) override { return {nullptr, device0}; }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* d, const void* s, size_t n) const override { default_copy_data(d, s, n); }
};
static Zeros zeros_alloc;
static Tensor efficient_zeros(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                              std::optional<at::Device>, std::optional<bool>) {
  return Tensor(at::detail::empty_generic(
      size, &zeros_alloc, c10::DispatchKeySet({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor}),
      c10::dtype_or_default(dtype), std::nullopt));
}
static Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  bool a = there(self), b = there(dst);
  int64_t bytes = self.numel() * self.element_size();
  if (a && !b) tell("down", "copy", bytes);
  if (!a && b) tell(non_blocking ? "up" : "up, awaited", "copy", bytes);
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor to = b ? aliased(dst) : dst;
  to.copy_(a ? aliased(self) : self);
  return dst;
}
static Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}
static at::Scalar local_scalar(const Tensor& self) {
  tell("item", "_local_scalar_dense", self.element_size());
  return at::native::_local_scalar_dense_cpu(aliased(self));
}
static const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  Call call{c10::Dispatcher::singleton().findSchemaOrThrow("aten::resize_", ""), {}, false};
  call.down(self).resize_(size, format);
  call.settle();
  return self;
}
static Tensor& set_storage(Tensor& self, at::Storage s, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(s), offset, size, stride);
}
static Tensor& set_source_storage(Tensor& self, at::Storage s) {
  int64_t n = int64_t(s.nbytes() / self.dtype().itemsize());
  return at::native::set_storage_cpu_(self, std::move(s), 0, {n}, {});
}
static Tensor& set_source_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) return self;
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
static Tensor& set_nothing(Tensor& self) {
  c10::Storage s(c10::Storage::use_byte_size_t(), 0, alloc.allocate(0), &alloc, true);
  return at::native::set_storage_cpu_(self, std::move(s), 0, {0}, {});
}

static Tensor down(const Tensor& t) {
  if (!t.defined()) return t;
  TORCH_CHECK(there(t), "Expected all tensors to be on the same device, but got one on ", t.device());
  return aliased(t);
}
static Tensor up(const Tensor& t) { return t.defined() ? wrapped(t) : t; }
static std::optional<Tensor> down(const std::optional<Tensor>& t) {
  return t && t->defined() ? std::optional<Tensor>(down(*t)) : std::nullopt;
}
static Tensor conv(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, at::IntArrayRef stride, at::IntArrayRef pad,
                   at::IntArrayRef dil, bool transposed, at::IntArrayRef out_pad, int64_t groups) {
  at::AutoDispatchBelowADInplaceOrView below;
  return up(at::convolution(down(x), down(w), down(b), stride, pad, dil, transposed, out_pad, groups));
}
static std::tuple<Tensor, Tensor, Tensor> conv_backward(
    const Tensor& g, const Tensor& x, const Tensor& w, at::IntArrayRef stride, at::IntArrayRef pad, at::IntArrayRef dil,
    bool transposed, at::IntArrayRef out_pad, int64_t groups, std::array<bool, 3> mask) {
  at::AutoDispatchBelowADInplaceOrView below;
  int64_t channels = g.size(1);
  auto [a, b, c] = at::convolution_backward(down(g), down(x), down(w), at::OptionalIntArrayRef({channels}), stride, pad, dil,
                                            transposed, out_pad, groups, mask);
  return {up(a), up(b), up(c)};
}

// Recurrent cells, of which the CPU has no fused kernels; order of gates as in torch.
static std::tuple<Tensor, Tensor, Tensor> lstm(const Tensor& ig, const Tensor& hg, const Tensor& cx,
                                               const std::optional<Tensor>& ib, const std::optional<Tensor>& hb) {
  at::AutoDispatchBelowADInplaceOrView below;
  TORCH_CHECK(ig.dim() == 2 && ig.sizes() == hg.sizes() && ig.size(1) % 4 == 0, "rnn: gates of shape ", ig.sizes(), ", ", hg.sizes());
  if (ib && ib->defined()) TORCH_CHECK(ib->dim() == 1 && ib->numel() == ig.size(1) && hb->sizes() == ib->sizes(), "rnn: bias");
  TORCH_CHECK(cx.dim() == 2 && cx.size(1) * 4 == ig.size(1) && cx.size(0) == ig.size(0), "rnn: cx");
  Tensor z = down(ig) + down(hg);
  if (ib && ib->defined()) z = z + down(*ib) + down(*hb);
  auto p = z.chunk(4, 1);
  Tensor i = p[0].sigmoid(), f = p[1].sigmoid(), g = p[2].tanh(), o = p[3].sigmoid();
  Tensor cy = f * down(cx) + i * g;
  return {up(o * cy.tanh()), up(cy), up(at::cat({i, f, g, o}, 1))};
}
static std::tuple<Tensor, Tensor, Tensor> lstm_backward(const std::optional<Tensor>& ghy, const std::optional<Tensor>& gcy,
                                                        const Tensor& cx, const Tensor& cy, const Tensor& workspace, bool bias) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (!(ghy && ghy->defined()) && !(gcy && gcy->defined())) return {};
  auto p = down(workspace).chunk(4, 1);
  Tensor i = p[0], f = p[1], g = p[2], o = p[3], c = down(cx), t = down(cy).tanh();
  Tensor gh = ghy && ghy->defined() ? down(*ghy) : at::zeros_like(t);
  Tensor gc = gh * o * (1 - t * t);
  if (gcy && gcy->defined()) gc = gc + down(*gcy);
  Tensor gates = at::cat({gc * g * i * (1 - i), gc * c * f * (1 - f), gc * i * (1 - g * g), gh * t * o * (1 - o)}, 1);
  return {up(gates), up(gc * f), bias ? up(gates.sum(0)) : Tensor()};
}
static std::tuple<Tensor, Tensor> gru(const Tensor& ig, const Tensor& hg, const Tensor& hx, const std::optional<Tensor>& ib,
                                      const std::optional<Tensor>& hb) {
  at::AutoDispatchBelowADInplaceOrView below;
  TORCH_CHECK(ig.dim() == 2 && ig.sizes() == hg.sizes() && ig.size(1) % 3 == 0, "rnn: gates of shape ", ig.sizes(), ", ", hg.sizes());
  if (ib && ib->defined()) TORCH_CHECK(ib->dim() == 1 && ib->numel() == ig.size(1) && hb->sizes() == ib->sizes(), "rnn: bias");
  TORCH_CHECK(hx.dim() == 2 && hx.size(1) * 3 == ig.size(1) && hx.size(0) == ig.size(0), "rnn: hx");
  Tensor a = down(ig), b = down(hg), h = down(hx);
  if (ib && ib->defined()) { a = a + down(*ib); b = b + down(*hb); }
  auto x = a.chunk(3, 1), y = b.chunk(3, 1);
  Tensor r = (x[0] + y[0]).sigmoid(), z = (x[1] + y[1]).sigmoid(), n = (x[2] + r * y[2]).tanh();
  return {up((h - n) * z + n), up(at::cat({r, z, n, h, y[2]}, 1))};
}
static std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_backward(const Tensor& ghy, const Tensor& workspace, bool bias) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto p = down(workspace).chunk(5, 1);
  Tensor r = p[0], z = p[1], n = p[2], h = p[3], hn = p[4], g = down(ghy);
  Tensor gz = g * (h - n) * z * (1 - z), gn = g * (1 - z) * (1 - n * n), gr = gn * hn * r * (1 - r);
  Tensor gi = at::cat({gr, gz, gn}, 1), gh = at::cat({gr, gz, gn * r}, 1);
  return {up(gi), up(gh), up(g * z), bias ? up(gi.sum(0)) : Tensor(), bias ? up(gh.sum(0)) : Tensor()};
}
static Tensor mse(const Tensor& a, const Tensor& b, int64_t reduction) {  // its `out` form warns of a resize on the CPU
  at::AutoDispatchBelowADInplaceOrView below;
  return up(at::mse_loss(down(a), down(b), reduction));
}

static int64_t plain(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) { return 0; }
namespace at::native { REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &plain); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zeros);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", [](const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); });
  m.impl("_reshape_alias", [](const Tensor& self, at::IntArrayRef a, at::IntArrayRef b) { return at::native::_reshape_alias(self, a, b); });
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_source_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_source_tensor);
  m.impl("set_", &set_nothing);
  m.impl("_fused_sdp_choice", &plain);
  m.impl("convolution_overrideable", &conv);
  m.impl("convolution_backward_overrideable", &conv_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_backward);
  m.impl("_thnn_fused_gru_cell", &gru);
  m.impl("_thnn_fused_gru_cell_backward", &gru_backward);
  m.impl("mse_loss", &mse);
}
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
namespace at::autocast {
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_PROMOTE(PROMOTE)
}
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  m.def("held", [] { return held.load(); });
  m.def("peak", [] { return peak.load(); });
  m.def("reset_peak", [] { peak = held.load(); });
  m.def("on_assert", [](py::object f) { on_assert = new py::object(f); });
  m.def("watch", [](py::object f) {
    watched = false;
    delete watcher;
    watcher = f.is_none() ? nullptr : new py::object(f);
    watched = watcher != nullptr;
  });
  m.def("refuse_float64", [](bool refuse) { no_double = refuse; });
  m.def("default_generator", [] { return py::reinterpret_steal<py::object>(THPGenerator_Wrap(default_generator())); });
}
