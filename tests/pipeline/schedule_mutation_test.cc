// Damaged schedules against a checker that shares nothing with the validator: it does not look at the lists, it runs
// them. Workers hold values, messages change hands only when both ends are there, gradients are added to a sum; in the
// end the books must balance.
#include <functional>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "moonpipe/pipeline/schedule.h"

namespace moonpipe {
namespace {

using Type = ActionType;

class Interpreter {
 public:
  Interpreter(const Schedule& schedule, uint64_t seed)
      : schedule_(schedule), options_(schedule.options), random_(seed) {}

  // True if the run ends, every list is used up, and every chunk did its work on every microbatch exactly once.
  bool Run() {
    at_.assign(schedule_.workers.size(), 0);
    sums_.assign(static_cast<size_t>(options_.stages) + 1, {});
    while (true) {
      std::vector<std::function<bool()>> possible;
      bool done = true;
      for (size_t w = 0; w < at_.size(); ++w) {
        if (Ended(w)) continue;
        done = false;
        const Action a = Current(w);
        if (!IsExchange(a.type)) {
          possible.push_back([this, w, a] { return Work(w, a); });
          continue;
        }
        for (size_t v = 0; v < at_.size(); ++v) {
          if (v == w || Ended(v) || !Meet(a, Current(v))) continue;
          const Action b = Current(v);
          possible.push_back([this, w, v, a, b] { return Exchange(w, v, a, b); });
        }
      }
      if (done) return Balanced();
      if (possible.empty()) return false;
      if (!possible[random_() % possible.size()]()) return false;
    }
  }

 private:
  bool Inner() const { return options_.has_vision && options_.vision_in_first_stage; }
  bool Outer() const { return options_.has_vision && !options_.vision_in_first_stage; }
  bool Ended(size_t w) const { return at_[w] == schedule_.workers[w].actions.size(); }
  const Action& Current(size_t w) const { return schedule_.workers[w].actions[at_[w]]; }

  static bool IsExchange(Type type) {
    return type != Type::kForward && type != Type::kBackward && type != Type::kReport;
  }
  // The two ends of one edge; whether they carry the same microbatch is looked at when they meet.
  static bool Meet(const Action& a, const Action& b) {
    switch (a.type) {
      case Type::kSendActivation:
        return b.type == Type::kReceiveActivation && b.chunk == a.chunk + 1;
      case Type::kSendGradient:
        return b.type == Type::kReceiveGradient && b.chunk == a.chunk - 1;
      case Type::kSendFeatures:
        return b.type == Type::kReceiveFeatures;
      case Type::kSendFeatureGradient:
        return b.type == Type::kReceiveFeatureGradient;
      case Type::kReduceTied:
        return b.type == Type::kReduceTied;
      default:
        return false;  // the receiving end is found from the sending one
    }
  }

  std::string Key(const char* what, int32_t chunk, int32_t m) const { return absl::StrCat(what, ".", chunk, ".", m); }
  bool Has(const std::string& key) const { return values_.count(key) > 0; }
  bool Put(const std::string& key) { return values_.insert(key).second; }

  bool Work(size_t w, const Action& a) {
    ++at_[w];
    const int32_t c = a.chunk;
    const int32_t m = a.microbatch;
    if (a.type == Type::kReport) {
      // Nothing may follow, and what is reported must be complete.
      return Ended(w) && reported_.insert(w).second && (c == schedule_.workers[w].chunks.back());
    }
    if (m < 0 || m >= options_.microbatches || c < -1 || c >= options_.stages || Has(Key("tied", c, -1))) return false;
    const bool last = c == options_.stages - 1;
    if (a.type == Type::kForward) {
      if (c == 0 && options_.has_vision && !Has(Key("features", 0, m))) return false;
      if (c > 0 && !Has(Key("in", c, m))) return false;
      if (c == kVisionChunk && !options_.has_vision) return false;
      if (c == kVisionChunk && Inner() && !Put(Key("features", 0, m))) return false;
      return Put(Key("out", c, m));
    }
    if (options_.forward_only || !Has(Key("out", c, m))) return false;
    if (c == kVisionChunk && !Has(Key("features_grad", c, m))) return false;
    if (c != kVisionChunk && !last && !Has(Key("grad", c, m))) return false;
    if (c == 0 && Inner() && !Put(Key("features_grad", kVisionChunk, m))) return false;
    sums_[static_cast<size_t>(c + 1)].push_back(m);
    return Put(Key("in_grad", c, m));
  }

  bool Exchange(size_t w, size_t v, const Action& a, const Action& b) {
    ++at_[w];
    ++at_[v];
    const int32_t m = a.microbatch;
    if (m != b.microbatch) return false;
    switch (a.type) {
      case Type::kSendActivation:
        return Has(Key("out", a.chunk, m)) && Put(Key("in", b.chunk, m));
      case Type::kSendGradient:
        return Has(Key("in_grad", a.chunk, m)) && Put(Key("grad", b.chunk, m));
      case Type::kSendFeatures:
        return Has(Key("out", kVisionChunk, m)) && Put(Key("features", 0, m));
      case Type::kSendFeatureGradient:
        return Has(Key("in_grad", 0, m)) && Put(Key("features_grad", kVisionChunk, m));
      case Type::kReduceTied:
        return Tie(a.chunk) && Tie(b.chunk) && a.chunk != b.chunk;
      default:
        return false;
    }
  }
  // Gradients that are exchanged must be complete; no work may follow on that chunk.
  bool Tie(int32_t c) {
    return options_.tied_embeddings && (c == 0 || c == options_.stages - 1) &&
           sums_[static_cast<size_t>(c + 1)].size() == static_cast<size_t>(options_.microbatches) &&
           Put(Key("tied", c, -1));
  }

  bool Balanced() const {
    std::vector<int32_t> all;
    for (int32_t m = 0; m < options_.microbatches; ++m) all.push_back(m);
    size_t values = 0;
    for (int32_t c = options_.has_vision ? -1 : 0; c < options_.stages; ++c) {
      if (!options_.forward_only && sums_[static_cast<size_t>(c + 1)] != all) return false;
      for (int32_t m = 0; m < options_.microbatches; ++m) {
        if (!Has(Key("out", c, m))) return false;
        values += 1;
        if (c > 0 && !Has(Key("in", c, m))) return false;
        values += c > 0 ? 1 : 0;
        values += c == 0 && options_.has_vision ? 1 : 0;
        if (options_.forward_only) continue;
        values += 1;                                                     // in_grad
        values += c == kVisionChunk || c < options_.stages - 1 ? 1 : 0;  // grad or features_grad
      }
    }
    const bool ties = options_.tied_embeddings && options_.stages > 1 && !options_.forward_only;
    // After the tie no send may follow that the tie would have to wait for: that order the schedule also promises.
    if (ties && !NothingButTheReportFollowsTheTie()) return false;
    return values_.size() == values + (ties ? 2 : 0) && reported_.size() == at_.size();
  }
  bool NothingButTheReportFollowsTheTie() const {
    for (const WorkerActions& worker : schedule_.workers) {
      for (size_t i = 0; i + 2 < worker.actions.size(); ++i) {
        if (worker.actions[i].type == Type::kReduceTied) return false;
      }
    }
    return true;
  }

  const Schedule& schedule_;
  const ScheduleOptions& options_;
  std::mt19937_64 random_;
  std::vector<size_t> at_;
  std::set<std::string> values_;
  std::set<size_t> reported_;
  std::vector<std::vector<int32_t>> sums_;
};

ScheduleOptions RandomOptions(std::mt19937_64& random) {
  ScheduleOptions options;
  options.name = random() % 2 == 0 ? "1f1b" : "gpipe";
  options.stages = 1 + static_cast<int32_t>(random() % 3);
  options.microbatches = 1 + static_cast<int32_t>(random() % 4);
  options.has_vision = random() % 3 != 0;
  options.vision_in_first_stage = random() % 2 == 0;
  options.tied_embeddings = random() % 2 == 0;
  options.forward_only = random() % 4 == 0;
  return options;
}

std::string Mutate(Schedule& schedule, std::mt19937_64& random) {
  auto& actions = schedule.workers[random() % schedule.workers.size()].actions;
  const size_t i = random() % actions.size();
  const size_t j = random() % actions.size();
  const Action action = actions[i];
  switch (random() % 5) {
    case 0:
      actions.erase(actions.begin() + static_cast<std::ptrdiff_t>(i));
      return absl::StrCat("drop ", action.ToString());
    case 1:
      actions.insert(actions.begin() + static_cast<std::ptrdiff_t>(j), action);
      return absl::StrCat("double ", action.ToString());
    case 2:
      std::swap(actions[i], actions[j]);
      return absl::StrCat("swap ", action.ToString(), " and ", actions[i].ToString());
    case 3:
      // Neighbours: the likeliest to stay valid, and the likeliest to hang.
      std::swap(actions[i], actions[(i + 1) % actions.size()]);
      return absl::StrCat("swap ", action.ToString(), " with its neighbour");
    default:
      actions.erase(actions.begin() + static_cast<std::ptrdiff_t>(i));
      actions.insert(actions.begin() + static_cast<std::ptrdiff_t>(random() % (actions.size() + 1)), action);
      return absl::StrCat("move ", action.ToString());
  }
}

TEST(ScheduleMutationTest, TheValidatorAgreesWithARunOfEveryDamagedSchedule) {
  std::mt19937_64 random(20240229);
  int refused = 0;
  int valid = 0;
  for (int i = 0; i < 4000; ++i) {
    const ScheduleOptions options = RandomOptions(random);
    Schedule schedule = *MakeSchedule(options);
    const std::string before = schedule.ToString();
    ASSERT_TRUE(Interpreter(schedule, random()).Run()) << before;
    const std::string mutation = Mutate(schedule, random);
    const bool runs = Interpreter(schedule, random()).Run();
    const absl::Status status = ValidateSchedule(schedule);
    ASSERT_EQ(status.ok(), runs) << mutation << " in\n" << before << "gives\n" << schedule.ToString() << status;
    (runs ? valid : refused) += 1;
  }
  EXPECT_GE(refused, 1000);
  EXPECT_GE(valid, 100);  // mutations that change nothing or only what is free to change
}

}  // namespace
}  // namespace moonpipe
