// Work divided over the threads of a pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace flax_attn {

// The threads that a call may use: those of XLA, or of a test.
class Pool {
 public:
  virtual ~Pool() = default;
  virtual int threads() const = 0;
  virtual void schedule(std::function<void()> work) = 0;
};

constexpr int SPINS = 1 << 12;        // some microseconds, in which others mostly finish: to sleep and wake takes longer
constexpr int64_t GRAIN = 1 << 17;  // multiply-adds that are worth waking a thread for, which takes some microseconds

// Runs task(worker, i) for every i in [0, count), each once; all are about `work` multiply-adds. `worker` is below `pool.threads() + 1`, and no two tasks
// that run at the same time share it. The caller draws tasks too, and waits only for those that another thread has
// begun: where all threads of the pool are busy it does all the work itself, so that there is no deadlock.
template <typename Task>
void parallel_for(Pool& pool, int64_t count, int64_t work, const Task& task) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int> workers{1};
    std::atomic<int64_t> finished{0};
    std::mutex mutex;
    std::condition_variable all_finished;
  };
  auto state = std::make_shared<State>();  // outlives this call where a thread comes late
  const Task* tasks = &task;               // read only for an i that was drawn, and so before this call returns
  auto draw = [state, tasks, count](int worker) {
    int64_t mine = 0;
    for (int64_t i; (i = state->next.fetch_add(1)) < count; ++mine) (*tasks)(worker, i);
    if (mine == 0) return;
    if (state->finished.fetch_add(mine) + mine < count) return;
    std::lock_guard<std::mutex> lock(state->mutex);
    state->all_finished.notify_all();
  };
  const int64_t helpers = std::min<int64_t>({pool.threads(), count - 1, work / GRAIN});
  for (int64_t i = 0; i < helpers; ++i) pool.schedule([state, draw] { draw(state->workers.fetch_add(1)); });
  draw(0);
  for (int i = 0; i < SPINS && state->finished < count; ++i) {
  }
  std::unique_lock<std::mutex> lock(state->mutex);
  state->all_finished.wait(lock, [&] { return state->finished == count; });
}

}  // namespace flax_attn
