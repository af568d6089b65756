// Ranks as NCCL has them: tensors of the current device alone, contiguous, of its dtypes. Gloo carries them, in the
// device's memory.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include "aliases.h"
#include "late.h"

class DoneWork final : public c10d::Work {
 public:
  explicit DoneWork(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  std::vector<at::Tensor> result() override { return tensors_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(tensors_));
    return future;
  }

 private:
  std::vector<at::Tensor> tensors_;
};

class NcclLike final : public c10d::Backend {
  using Tensors = std::vector<at::Tensor>;
  using Lists = std::vector<Tensors>;
  using Done = c10::intrusive_ptr<c10d::Work>;

 public:
  explicit NcclLike(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccllike"; }
  void setTimeout(std::chrono::milliseconds) override {}
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override {}
  Done endCoalescing() override { return c10::make_intrusive<DoneWork>(Tensors{}); }

  Done broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto there = on_host(tensors);
    return done(gloo_->broadcast(there, options), tensors);
  }
  Done allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto there = on_host(tensors);
    sum(there, options.reduceOp);
    return c10::make_intrusive<DoneWork>(tensors);
  }
  Done allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  Done reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto there = copies(on_host(tensors));
    sum(there, options.reduceOp);
    if (getRank() == options.rootRank)
      for (size_t i = 0; i < tensors.size(); ++i) alias_of(tensors[i]).copy_(there[i]);
    return c10::make_intrusive<DoneWork>(tensors);
  }
  Done allgather(Lists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    auto there = on_host(outputs);
    auto from = on_host(inputs);
    return done(gloo_->allgather(there, from, options), outputs[0]);
  }
  Done _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto there = on_host(output);
    auto from = on_host(input).clone();  // it may be a part of the output
    return done(gloo_->_allgather_base(there, from, options), {output});
  }
  Done allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
    return c10::make_intrusive<DoneWork>(outputs);
  }
  Done gather(Lists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto there = on_host(outputs);
    auto from = on_host(inputs);
    return done(gloo_->gather(there, from, options), outputs.empty() ? Tensors{} : outputs[0]);
  }
  Done scatter(Tensors& outputs, Lists& inputs, const c10d::ScatterOptions& options) override {
    auto there = on_host(outputs);
    auto from = on_host(inputs);
    return done(gloo_->scatter(there, from, options), outputs);
  }
  Done reduce_scatter(Tensors& outputs, Lists& inputs, const c10d::ReduceScatterOptions& options) override {
    auto there = on_host(outputs);
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto summed = copies(on_host(inputs[i]));
      sum(summed, options.reduceOp);
      there[i].copy_(summed[getRank()]);
    }
    return c10::make_intrusive<DoneWork>(outputs);
  }
  Done _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto there = on_host(output);
    auto summed = copies({on_host(input)});
    sum(summed, options.reduceOp);
    if (output.numel()) there.view(-1).copy_(summed[0].view({getSize(), -1})[getRank()]);
    return c10::make_intrusive<DoneWork>(Tensors{output});
  }
  Done reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], options);
    return c10::make_intrusive<DoneWork>(outputs);
  }
  Done alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto there = on_host(output);
    auto from = on_host(input);
    return done(gloo_->alltoall_base(there, from, output_sizes, input_sizes, options), {output});
  }
  Done alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto there = on_host(outputs);
    auto from = on_host(inputs);
    for (int step = 0; step < getSize(); ++step) {  // gloo has none
      int to = (getRank() + step) % getSize(), of = (getRank() + getSize() - step) % getSize();
      if (!step) {
        there[to].copy_(from[to]);
        continue;
      }
      Tensors outgoing{from[to]}, incoming{there[of]};
      auto sent = gloo_->send(outgoing, to, 0), received = gloo_->recv(incoming, of, 0);
      sent->wait();
      received->wait();
    }
    return c10::make_intrusive<DoneWork>(outputs);
  }
  Done send(Tensors& tensors, int to, int tag) override {
    auto there = on_host(tensors);
    return done(gloo_->send(there, to, tag), tensors);
  }
  Done recv(Tensors& tensors, int from, int tag) override {
    auto there = on_host(tensors);
    return done(gloo_->recv(there, from, tag), tensors);
  }
  Done barrier(const c10d::BarrierOptions&) override {
    host_waits("barrier");
    return done(gloo_->barrier(), {});
  }

 private:
  static at::Tensor on_host(const at::Tensor& tensor) {
    using T = at::ScalarType;
    static const std::set<T> dtypes = {T::Char, T::Byte, T::Float,    T::Double, T::Int,
                                       T::Long, T::Half, T::BFloat16, T::Bool,   T::Float8_e4m3fn, T::Float8_e5m2};
    TORCH_CHECK(tensor.device().type() == kType, "No backend type associated with device type ", tensor.device().type());
    TORCH_CHECK_TYPE(
        dtypes.count(tensor.scalar_type()),
        "Input tensor data type is not supported for NCCL process group: ", tensor.scalar_type());
    TORCH_CHECK_VALUE(tensor.is_contiguous(), "Tensors must be contiguous");
    TORCH_CHECK(
        tensor.device().index() == current_device, "a tensor on ", tensor.device(), ", where device ", int(current_device),
        " is the current one");
    return alias_of(tensor);
  }
  static Tensors on_host(const Tensors& tensors) {
    Tensors found;
    for (auto& tensor : tensors) found.push_back(on_host(tensor));
    return found;
  }
  static Lists on_host(const Lists& lists) {
    Lists found;
    for (auto& tensors : lists) found.push_back(on_host(tensors));
    return found;
  }
  static Tensors copies(const Tensors& tensors) {
    Tensors found;
    for (auto& tensor : tensors) found.push_back(tensor.clone());
    return found;
  }

  void sum(Tensors& tensors, c10d::ReduceOp op) {
    bool is_mean = op == c10d::ReduceOp::AVG;
    for (auto& tensor : tensors) {
      Tensors one{tensor};
      c10d::AllreduceOptions options;
      if (!is_mean) options.reduceOp = op;
      gloo_->allreduce(one, options)->wait();
      if (is_mean) tensor.div_(getSize());
    }
  }
  static Done done(const Done& work, const Tensors& tensors) {
    work->wait();
    return c10::make_intrusive<DoneWork>(tensors);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};
