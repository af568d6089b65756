// Every operation on the device: the CPU's kernel, run in place on the device's memory. Tensors of two devices are
// refused as CUDA refuses them.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue_inl.h>
#include <unordered_set>
#include "aliases.h"

struct DeviceGenerator final : at::CPUGeneratorImpl {
  explicit DeviceGenerator(c10::DeviceIndex index) {
    device_ = c10::Device(kType, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

inline at::Generator& default_generator() {
  static auto* made = new at::Generator(at::make_generator<DeviceGenerator>(0));
  return *made;
}

// Makes tensors on `device`: the allocator asks for the current one.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device) : before_(current_device) {
    if (device.index() >= 0) current_device = device.index();
  }
  ~OnDevice() { current_device = before_; }

 private:
  c10::DeviceIndex before_;
};

inline at::Tensor empty_strided_on(c10::Device device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  OnDevice within(device);
  constexpr auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(sizes, strides, &device_allocator, keys, dtype);
}

inline void resize_bytes(c10::StorageImpl* storage, size_t num_bytes) {
  OnDevice within(storage->device());
  auto fresh = device_allocator.allocate(num_bytes);
  if (storage->data() && num_bytes)
    device_allocator.copy_data(fresh.get(), storage->data(), std::min(num_bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(num_bytes);
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), schema_(op.schema()), stack_(stack) {
    name_ = schema_.name() + (schema_.overload_name().empty() ? "" : "." + schema_.overload_name());
  }

  void run() {
    size_t begin = stack_->size() - schema_.arguments().size();
    for (size_t i = 0; i < schema_.arguments().size(); ++i)
      (*stack_)[begin + i] = taken((*stack_)[begin + i], schema_.arguments()[i]);
    check_host_tensors();
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    for (auto& [generator, on_host] : generators_) generator.set_state(on_host.get_state());
    for (auto& [tensor, on_host] : grown_)
      if (on_host.numel() || on_host.sizes() != tensor.sizes()) {
        tensor.resize_(on_host.sizes());
        alias_of(tensor).copy_(on_host);
      }
    begin = stack_->size() - schema_.returns().size();
    for (size_t i = 0; i < schema_.returns().size(); ++i) (*stack_)[begin + i] = given_back((*stack_)[begin + i]);
  }

 private:
  c10::IValue taken(const c10::IValue& value, const c10::Argument& argument) {
    bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) return taken(value.toTensor(), is_written);
    if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = taken(tensor, is_written);
      return tensors;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> found;
      for (auto& tensor : value.toOptionalTensorVector())
        found.push_back(tensor ? std::optional(taken(*tensor, is_written)) : std::nullopt);
      return found;
    }
    if (value.isDevice() && value.toDevice().type() == kType) {
      if (!device_) device_ = value.toDevice();
      return c10::Device(c10::DeviceType::CPU);
    }
    if (argument.type()->str().find("Generator") != std::string::npos) return taken_generator(value);
    return value;
  }

  at::Tensor taken(const at::Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kType) {
      on_host_.push_back(tensor);
      return tensor;
    }
    TORCH_CHECK(!device_ || *device_ == tensor.device() || pairs_.empty(), two_devices(), tensor.device(), "! (", name_, ")");
    device_ = tensor.device();
    for (auto& [known, alias] : pairs_)
      if (known.is_same(tensor)) return alias;
    bool may_grow = is_written && !tensor.numel() && !tensor.storage().nbytes();
    auto alias = may_grow ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU))
                          : aliases_.of(tensor);
    if (may_grow) grown_.emplace_back(tensor, alias);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs_.emplace_back(tensor, alias);
    return alias;
  }

  // Kernels take a generator of the CPU: one of the same state, which is put back.
  c10::IValue taken_generator(const c10::IValue& value) {
    auto generator = value.isGenerator() ? value.toGenerator() : default_generator();
    TORCH_CHECK(
        generator.device().type() == kType, "Expected a 'simulated' device type for generator but found '",
        generator.device().type(), "' (", name_, ")");
    auto on_host = at::detail::createCPUGenerator();
    on_host.set_state(generator.get_state());
    generators_.emplace_back(generator, on_host);
    return on_host;
  }

  void check_host_tensors() const {
    if (pairs_.empty()) return;
    for (auto& tensor : on_host_) {
      bool is_scalar = tensor.dim() == 0 && (tensor.unsafeGetTensorImpl()->is_wrapped_number() || takes_host_scalars());
      TORCH_CHECK(
          is_scalar || takes_host_tensors(), two_devices(), "cpu! (", name_, ", a CPU tensor of shape ", tensor.sizes(), ")");
    }
  }

  std::string two_devices() const {
    return c10::str("Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ");
  }
  bool takes_host_scalars() const {
    static const std::unordered_set<std::string> others = {
        "aten::fill_", "aten::masked_fill", "aten::masked_fill_", "aten::where", "aten::index_fill", "aten::index_fill_"};
    return op_.hasTag(at::Tag::pointwise) || others.count(schema_.name());
  }
  bool takes_host_tensors() const {  // indices, lengths, steps of optimizers
    static const std::unordered_set<std::string> names = {
        "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index",
        "aten::_unsafe_index_put", "aten::_pack_padded_sequence", "aten::_fused_adam_", "aten::_fused_adamw_",
        "aten::set_data", "aten::_foreach_add", "aten::_foreach_add_"};
    return names.count(schema_.name());
  }

  c10::IValue given_back(const c10::IValue& value) {
    if (value.isTensor()) return given_back(value.toTensor());
    if (!value.isTensorList()) return value;
    auto tensors = value.toTensorVector();
    for (auto& tensor : tensors) tensor = given_back(tensor);
    return tensors;
  }

  at::Tensor given_back(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != c10::DeviceType::CPU) return tensor;
    for (auto& [known, alias] : pairs_)
      if (alias.is_same(tensor)) return known;
    if (auto* origin = aliases_.origin(tensor)) {  // a view
      c10::Storage storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(origin));
      constexpr auto keys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
      auto view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, tensor.dtype());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
      return view;
    }
    auto device = device_.value_or(c10::Device(kType, current_device));
    auto made = empty_strided_on(
        device, tensor.sizes(),
        tensor.is_non_overlapping_and_dense() ? tensor.strides() : at::IntArrayRef(tensor.contiguous().strides()),
        tensor.scalar_type());
    if (tensor.numel()) alias_of(made).copy_(tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
    return made;
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  std::string name_;
  std::optional<c10::Device> device_;
  Aliases aliases_;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_, grown_;  // on the device, and on the host
  std::vector<std::pair<at::Generator, at::Generator>> generators_;
  std::vector<at::Tensor> on_host_;
};
