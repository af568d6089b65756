// torch's device `simulated`, on PrivateUse1: what torch asks of a device, and the few operations that no CPU kernel can
// do for it.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>
#include <torch/library.h>
#include <atomic>
#include <set>
#include "group.h"
#include "kernels.h"
#include "late.h"
#include "memory.h"

namespace {

thread_local c10::StreamId current_stream = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }

  // Streams have numbers, and are one queue.
  c10::Stream getStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, device, current_stream);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::atomic<c10::StreamId> num{0};
    return c10::Stream(c10::Stream::UNSAFE, device, ++num);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    current_stream = stream.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return asked(late().num()); }
  void synchronizeStream(const c10::Stream&) const override { host_waits("stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { host_waits("device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  // An event is how many copies were under way, or done, when it was recorded.
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new uint64_t;
    *static_cast<uint64_t*>(*event) = late().num();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override { return !event || asked(*static_cast<uint64_t*>(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits("event", *static_cast<uint64_t*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<uint64_t*>(event); }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0; }

 private:
  static bool asked(uint64_t number) {  // not yet done when first asked, so that who asks again goes on
    bool is_done = late().is_done(number);
    late().finish(number);
    return is_done;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return std::exchange(current_device, device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<DeviceGenerator>(index < 0 ? current_device : index);
  }
  at::Device getDeviceFromPtr(void*) const override { return {kType, current_device}; }
  bool isPinnedPtr(const void* pointer) const override { return PinnedAllocator::has(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_bytes(storage.unsafeGetStorageImpl(), num_bytes);
  }
};

// ---- operations on memory itself

using Dtype = std::optional<at::ScalarType>;
using MaybeLayout = std::optional<at::Layout>;
using MaybeDevice = std::optional<at::Device>;

c10::Device or_current(MaybeDevice device) { return device.value_or(c10::Device(kType, current_device)); }

at::Tensor empty(
    at::IntArrayRef sizes, Dtype dtype, MaybeLayout, MaybeDevice device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  OnDevice within(or_current(device));
  constexpr auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &device_allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, Dtype dtype, MaybeLayout, MaybeDevice device, std::optional<bool>) {
  return empty_strided_on(or_current(device), sizes, strides, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView guard;
  bool is_from_host = from.device().type() != kType, is_to_host = to.device().type() != kType;
  if (!from.numel()) return to;
  if (is_from_host) tell("send", "copy from the host");
  if (is_to_host && non_blocking) {
    late().copy_to_host(from, to);
  } else if (is_from_host && non_blocking && PinnedAllocator::has(from.const_data_ptr())) {
    late().copy_from_pinned(from, to);
  } else {  // what is not pinned is copied aside before the call returns
    if (is_to_host) host_waits("copy to the host");
    if (is_from_host && !non_blocking) host_waits("copy from the host");
    alias_of(to).copy_(alias_of(from));
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  host_waits("item");
  return alias_of(tensor).item();
}

const at::Tensor& resize_(const at::Tensor& tensor, at::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  auto ints = C10_AS_INTARRAYREF_SLOW(sizes);
  size_t num_bytes = (c10::multiply_integers(ints) + tensor.storage_offset()) * tensor.dtype().itemsize();
  if (num_bytes > tensor.storage().nbytes()) resize_bytes(tensor.storage().unsafeGetStorageImpl(), num_bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(ints);
  return tensor;
}

at::Tensor as_strided(
    const at::Tensor& tensor, at::SymIntArrayRef sizes, at::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->guard_int(__FILE__, __LINE__)) : std::nullopt;
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), start);
}
at::Tensor view(const at::Tensor& tensor, at::SymIntArrayRef sizes) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(sizes));
}
at::Tensor reshape_alias(const at::Tensor& tensor, at::SymIntArrayRef sizes, at::SymIntArrayRef strides) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

at::Tensor& set_storage(
    at::Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  if (strides.empty()) tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  else tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
  return tensor;
}
at::Tensor& set_storage_and_offset(
    at::Tensor& tensor, at::Storage storage, c10::SymInt offset, at::SymIntArrayRef sizes, at::SymIntArrayRef strides) {
  return set_storage(
      tensor, std::move(storage), offset.guard_int(__FILE__, __LINE__), C10_AS_INTARRAYREF_SLOW(sizes),
      C10_AS_INTARRAYREF_SLOW(strides));
}
at::Tensor& set_whole_storage(at::Tensor& tensor, at::Storage storage) {
  int64_t numel = storage.nbytes() / tensor.dtype().itemsize();
  return set_storage(tensor, std::move(storage), 0, {numel}, {1});
}
at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& other) {
  return set_storage(tensor, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
at::Tensor& set_nothing(at::Tensor& tensor) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true);
  return set_storage(tensor, std::move(storage), 0, {0}, {1});
}

// CUDA counts integers too.
at::Tensor histc(const at::Tensor& values, int64_t num_bins, const at::Scalar& lowest, const at::Scalar& highest) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto counts = at::histc(alias_of(values).to(at::kDouble), num_bins, lowest, highest).to(values.scalar_type());
  auto found = empty_strided_on(values.device(), counts.sizes(), counts.strides(), counts.scalar_type());
  alias_of(found).copy_(counts);
  return found;
}

void record_stream(at::Tensor&, c10::Stream) {}

void any_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operation>());
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) { library.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("_reshape_alias", &reshape_alias);
  library.impl("resize_", &resize_);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &local_scalar_dense);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Storage_storage_offset", &set_storage_and_offset);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("set_", &set_nothing);
  library.impl("histc", &histc);
  library.impl("record_stream", &record_stream);
}

bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(kType, &device_allocator);
  return true;
}();

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("current_device", [] { return int(current_device); });
  module.def("set_device", [](int index) { current_device = index; });
  module.def("num_devices", [] { return kNumDevices; });
  module.def("bytes_in_use", [] { return arena().in_use(); });
  module.def("peak_bytes", [] { return arena().peak(); });
  module.def("reset_peak", [] { arena().reset_peak(); });
  module.def("default_generator", [] { return default_generator(); });
  module.def("on_event", [](py::object told) { listener() = std::move(told); });
  module.def("nccl_like", [](const c10::intrusive_ptr<c10d::Backend>& gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<NcclLike>(gloo);
  });
}
