// A device whose memory is the host's: what tests/gpu/simulated.py makes the device "sim" of.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kSim> {
  c10::Device getDevice() const override { return c10::Device(kSim, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, getDevice()); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return getStream(getDevice()); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Block {  // memory of the device, on which several storages may lie
  int64_t bytes = 0;
  int64_t holders = 0;
};

std::mutex blocks_mutex;
std::map<void*, Block> blocks;
int64_t live_bytes = 0;
int64_t allocations = 0;
bool watched = false;
std::vector<int64_t> changes;  // while it is watched, in threes: address, bytes, stream that allocates; -1: it is freed
thread_local int64_t current_stream = 0;

void hold(void* data, size_t bytes) {
  if (data == nullptr) return;
  std::lock_guard<std::mutex> lock(blocks_mutex);
  auto& block = blocks[data];
  if (block.holders++ > 0) return;
  block.bytes = static_cast<int64_t>(bytes);
  live_bytes += block.bytes;
  ++allocations;
  if (watched) changes.insert(changes.end(), {reinterpret_cast<int64_t>(data), block.bytes, current_stream});
}

void let_go(void* data) {
  if (data == nullptr) return;
  std::lock_guard<std::mutex> lock(blocks_mutex);
  auto found = blocks.find(data);
  if (--found->second.holders > 0) return;
  live_bytes -= found->second.bytes;
  if (watched) changes.insert(changes.end(), {reinterpret_cast<int64_t>(data), found->second.bytes, -1});
  blocks.erase(found);
}

void note_end(void* data) {  // of pinned memory of the host
  std::lock_guard<std::mutex> lock(blocks_mutex);
  if (watched) changes.insert(changes.end(), {reinterpret_cast<int64_t>(data), 0, -1});
}

std::vector<int64_t> memory_now() {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  return {live_bytes, static_cast<int64_t>(blocks.size()), allocations};
}

void watch(bool on) {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  watched = on;
  changes.clear();
}

std::vector<int64_t> take_changes() {
  std::lock_guard<std::mutex> lock(blocks_mutex);
  return std::exchange(changes, {});
}

int64_t get_stream() {
  return current_stream;
}

int64_t exchange_stream(int64_t stream) {
  return std::exchange(current_stream, stream);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(bytes);
    hold(data, bytes);
    return {data, data, raw_deleter(), c10::Device(kSim, 0)};
  }
  static void release(void* data) {
    let_go(data);
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Memory memory;
REGISTER_ALLOCATOR(kSim, &memory);

std::mutex pinned_mutex;
std::set<const void*> pinned;  // where pinned memory of the host begins

struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(bytes);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.insert(data);
    return {data, data, raw_deleter(), c10::Device(c10::DeviceType::CPU)};
  }
  static void release(void* data) {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(data);
    note_end(data);
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Pinned pinned_memory;

struct Draws final : c10::GeneratorImpl {  // the device's own stream of random numbers, drawn by one of the host's
  at::Generator host = at::detail::createCPUGenerator();

  Draws() : c10::GeneratorImpl(c10::Device(kSim, 0), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Draws* clone_impl() const override {
    auto* copy = new Draws();
    copy->host = host.clone();
    return copy;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  at::Generator draws = at::make_generator<Draws>();

  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return draws; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Draws>(); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    return pinned.count(data) > 0;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = memory.allocate(bytes);
    std::memcpy(data.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
};

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type, format);
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>,
    std::optional<at::Device>,
    std::optional<bool>) {
  auto type = c10::dtype_or_default(dtype);
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), type);
}

at::Tensor alias(const at::Tensor& x, c10::Device device, c10::DispatchKey key) {
  auto* held = new c10::Storage(x.storage());
  c10::DeleterFnPtr release = [](void* context) { delete static_cast<c10::Storage*>(context); };
  if (!device.is_cpu()) {
    hold(held->mutable_data(), held->nbytes());
    release = [](void* context) {
      auto* held = static_cast<c10::Storage*>(context);
      let_go(held->mutable_data());
      delete held;
    };
  }
  c10::DataPtr data(held->mutable_data(), held, release, device);
  auto* allocator = device.is_cpu() ? c10::GetCPUAllocator() : static_cast<c10::Allocator*>(&memory);
  c10::Storage storage(c10::Storage::use_byte_size_t(), held->nbytes(), std::move(data), allocator, true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), x.dtype());
  auto* impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  result._set_conj(x.is_conj());
  result._set_neg(x.is_neg());
  return result;
}

at::Tensor on_host(const at::Tensor& x) {
  return alias(x, c10::Device(c10::DeviceType::CPU), c10::DispatchKey::CPU);
}

at::Tensor on_device(const at::Tensor& x) {
  return alias(x, c10::Device(kSim, 0), c10::DispatchKey::PrivateUse1);
}

void set_data(const at::Tensor& x, const at::Tensor& data) {  // Tensor.data = ..., from one device to the other
  auto* meta = torch::autograd::impl::get_autograd_meta(x);
  if (meta != nullptr) {
    std::lock_guard<std::mutex> lock(meta->mutex_);
    meta->grad_accumulator_.reset();
  }
  x.unsafeGetTensorImpl()->shallow_copy_from(data.getIntrusivePtr());
}

std::optional<at::Generator> host_generator(const std::optional<at::Generator>& generator) {
  return static_cast<Draws*>(generator->unsafeGetGeneratorImpl())->host;
}

std::optional<at::Generator> default_generator() {
  return at::detail::getPrivateUse1Hooks().getDefaultGenerator(0);
}

}  // namespace

TORCH_LIBRARY(sim, library) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  library.def("on_host(Tensor x) -> Tensor", &on_host);
  library.def("on_device(Tensor x) -> Tensor", &on_device);
  library.def("set_data(Tensor x, Tensor data) -> ()", &set_data);
  library.def("host_generator(Generator? generator) -> Generator?", &host_generator);
  library.def("default_generator() -> Generator?", &default_generator);
  library.def("memory() -> int[]", &memory_now);
  library.def("watch(bool on) -> ()", &watch);
  library.def("changes() -> int[]", &take_changes);
  library.def("stream() -> int", &get_stream);
  library.def("exchange_stream(int stream) -> int", &exchange_stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("view_as_real", &at::native::view_as_real);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("unfold", &at::native::unfold);
  library.impl("resize_", &at::native::resize_);
  library.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
}

// These keep the bits of lazy conjugation and negation: to resolve them first would be a copy of a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(sim, Conjugate, library) {
  library.impl("on_host", torch::CppFunction::makeFallthrough());
  library.impl("on_device", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(sim, Negative, library) {
  library.impl("on_host", torch::CppFunction::makeFallthrough());
  library.impl("on_device", torch::CppFunction::makeFallthrough());
}
