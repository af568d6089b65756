// CPU tensors on the memory of the device's tensors: what kernels and collectives work on.
#pragma once
#include <ATen/ATen.h>
#include "memory.h"

class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != kType) return tensor;
    constexpr auto keys = c10::DispatchKeySet(c10::DispatchKey::CPU);
    auto made = at::detail::make_tensor<c10::TensorImpl>(of(tensor.storage()), keys, tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return made;
  }

  // The storage on the device that an alias was made of; null where it was made of none.
  c10::StorageImpl* origin(const at::Tensor& alias) const {
    if (!alias.has_storage() || !arena().is_for_kernels(alias.storage().data())) return nullptr;
    for (auto& [on_device, on_host] : known_)
      if (on_host.unsafeGetStorageImpl() == alias.storage().unsafeGetStorageImpl()) return on_device;
    return nullptr;
  }

 private:
  c10::Storage of(const c10::Storage& storage) {
    for (auto& [on_device, on_host] : known_)
      if (on_device == storage.unsafeGetStorageImpl()) return on_host;
    c10::DataPtr data(arena().for_kernels(storage.data()), c10::Device(c10::DeviceType::CPU));
    c10::Storage made(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
    known_.emplace_back(storage.unsafeGetStorageImpl(), made);
    return made;
  }
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> known_;
};

inline at::Tensor alias_of(const at::Tensor& tensor) { return Aliases().of(tensor); }
