// Pools of threads for the kernels: one that works, and one whose threads never come.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "parallel.h"

class Threads : public flax_attn::Pool {
 public:
  explicit Threads(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { run(); });
  }
  ~Threads() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopped_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int threads() const override { return static_cast<int>(threads_.size()); }
  void schedule(std::function<void()> work) override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_one();
  }

 private:
  void run() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stopped_ || !queue_.empty(); });
      if (queue_.empty()) return;  // what is queued is run first
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  bool stopped_ = false;
  std::vector<std::thread> threads_;  // last: they use all of the above
};

// Runs nothing until late() is called, by then long after the call that scheduled it.
class Idle : public flax_attn::Pool {
 public:
  int threads() const override { return 3; }
  void schedule(std::function<void()> work) override { queue_.push_back(std::move(work)); }
  size_t late() {
    for (const auto& work : queue_) work();
    return queue_.size();
  }

 private:
  std::vector<std::function<void()>> queue_;
};
