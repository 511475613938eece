#include "services/coordinator/worker_pool.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "moonpipe/base/logging.h"
#include "moonpipe/pipeline/schedule.h"

namespace moonpipe {

using worker::v1::ConnectRequest;
using worker::v1::ConnectResponse;

namespace {
// How often silence is looked for while nothing happens.
constexpr absl::Duration kLook = absl::Milliseconds(200);

// "1RF2 on edge activation.0, microbatch 2"
std::string Place(const std::string& action, const std::string& edge, int32_t microbatch) {
  return absl::StrCat(action, edge.empty() ? "" : absl::StrCat(" on edge ", edge),
                      microbatch >= 0 ? absl::StrCat(", microbatch ", microbatch) : "");
}

// Is this worker at one end of the edge? Names follow the stages that they join.
bool IsEndOf(const worker::v1::Register& worker, absl::string_view edge) {
  const bool stage = worker.role() == common::v1::WORKER_ROLE_DECODER_STAGE;
  if (absl::StartsWith(edge, "feature")) return !stage || worker.ordinal() == 0;
  uint32_t first = 0;
  const size_t dot = edge.rfind('.');
  if (!stage || dot == absl::string_view::npos || !absl::SimpleAtoi(edge.substr(dot + 1), &first)) return false;
  return worker.ordinal() == first || worker.ordinal() == first + 1;
}

// Where a worker's last heartbeat left it.
std::string PlaceOf(const WorkerInfo& worker) {
  const absl::StatusOr<Action> action = ParseAction(worker.activity);
  return Place(worker.activity, worker.waiting_for, action.ok() ? action->microbatch : -1);
}
}  // namespace

WorkerPool::WorkerPool(WorkerHub* hub, std::vector<WorkerInfo> members, Options options)
    : hub_(hub), members_(std::move(members)), options_(options) {}

std::optional<WorkerInfo> WorkerPool::Latest(uint32_t worker) const {
  for (WorkerInfo& info : hub_->Workers()) {
    if (info.id == worker) return std::move(info);
  }
  return std::nullopt;
}

std::string WorkerPool::NameOf(uint32_t worker) const {
  for (const WorkerInfo& member : members_) {
    if (member.id == worker) return member.ToString();
  }
  return absl::StrCat("worker ", worker);
}

void WorkerPool::Send(uint32_t worker, ConnectResponse command) {
  // A worker that is gone shows in the next Await.
  if (absl::Status sent = hub_->Send(worker, std::move(command)); !sent.ok()) MP_LOG(WARNING) << sent.message();
}

void WorkerPool::SendAll(const ConnectResponse& command) {
  for (const WorkerInfo& member : members_) Send(member.id, command);
}

absl::Status WorkerPool::Await(const std::string& what, absl::Time deadline, const std::function<bool()>& done,
                               const std::function<std::vector<uint32_t>()>& missing) {
  std::vector<Sign> signs;
  while (!done()) {
    const absl::Time now = absl::Now();
    if (now >= deadline) {
      std::vector<std::string> names;
      for (uint32_t worker : missing()) {
        const std::optional<WorkerInfo> info = Latest(worker);
        names.push_back(info.has_value() && !info->waiting_for.empty()
                            ? absl::StrCat(NameOf(worker), " (at ", PlaceOf(*info), ")")
                            : NameOf(worker));
      }
      return absl::DeadlineExceededError(absl::StrCat("while ", what, ": no answer in time from ", absl::StrJoin(names, ", "),
                                                      "; raise runtime's timeouts if the work is really that long"));
    }
    absl::StatusOr<WorkerEvent> event = hub_->Next(std::min(deadline, now + kLook));
    if (event.ok()) {
      Take(*std::move(event), signs);
    } else if (!absl::IsDeadlineExceeded(event.status())) {
      return event.status();
    }
    FindSilent(signs);
    if (signs.empty()) continue;
    // Others will say what they saw of it: the edge and the microbatch.
    const absl::Time until = absl::Now() + options_.gather;
    while (absl::Now() < until) {
      absl::StatusOr<WorkerEvent> more = hub_->Next(until);
      if (more.ok()) Take(*std::move(more), signs);
    }
    return Explain(what, std::move(signs));
  }
  return absl::OkStatus();
}

bool WorkerPool::Take(WorkerEvent event, std::vector<Sign>& signs) {
  const bool member =
      std::any_of(members_.begin(), members_.end(), [&](const WorkerInfo& info) { return info.id == event.worker; });
  if (!member) return false;
  if (event.disconnected) {
    signs.push_back({Sign::Kind::kLeft, event.worker, {}});
    return true;
  }
  ConnectRequest& message = event.message;
  switch (message.event_case()) {
    case ConnectRequest::kPlanReady:
      if (message.plan_ready().generation() == options_.generation) ready[event.worker] = message.plan_ready();
      return false;
    case ConnectRequest::kPublishManifest:
      if (message.publish_manifest().generation() == options_.generation) {
        const uint64_t step = message.publish_manifest().manifest().step();
        manifests[step] = std::move(*message.mutable_publish_manifest());
      }
      return false;
    case ConnectRequest::kStepReport:
      if (message.step_report().generation() == options_.generation) {
        const uint64_t step = message.step_report().step();
        reports[step][event.worker] = std::move(*message.mutable_step_report());
      }
      return false;
    case ConnectRequest::kStepCommitted:
      if (message.step_committed().generation() == options_.generation) {
        committed[message.step_committed().step()][event.worker] = true;
      }
      return false;
    case ConnectRequest::kShardsSaved:
      if (message.shards_saved().generation() == options_.generation) {
        const uint64_t step = message.shards_saved().step();
        saved[step][event.worker] = std::move(*message.mutable_shards_saved());
      }
      return false;
    case ConnectRequest::kFailure:
      signs.push_back({Sign::Kind::kReported, event.worker, message.failure()});
      return true;
    default:
      return false;
  }
}

void WorkerPool::FindSilent(std::vector<Sign>& signs) const {
  const absl::Time now = absl::Now();
  for (const WorkerInfo& info : hub_->Workers()) {
    const bool member = std::any_of(members_.begin(), members_.end(), [&](const WorkerInfo& m) { return m.id == info.id; });
    if (member && now - info.last_heard > options_.heartbeat_timeout) signs.push_back({Sign::Kind::kSilent, info.id, {}});
  }
}

absl::Status WorkerPool::Explain(const std::string& what, std::vector<Sign> signs) const {
  // The cause: a silent worker, then one that left without a word, then a report that blames no edge, then any report.
  auto spoke = [&](uint32_t worker) {
    return std::any_of(signs.begin(), signs.end(),
                       [&](const Sign& sign) { return sign.worker == worker && sign.kind == Sign::Kind::kReported; });
  };
  auto rank = [&](const Sign& sign) {
    if (sign.kind == Sign::Kind::kSilent) return 0;
    if (sign.kind == Sign::Kind::kLeft) return spoke(sign.worker) ? 4 : 1;
    return sign.failure.edge().empty() ? 2 : 3;
  };
  const Sign cause = *std::min_element(signs.begin(), signs.end(), [&](const Sign& a, const Sign& b) { return rank(a) < rank(b); });
  const std::optional<WorkerInfo> info = Latest(cause.worker);
  std::string message;
  absl::StatusCode code = absl::StatusCode::kUnavailable;
  switch (cause.kind) {
    case Sign::Kind::kSilent:
      message = absl::StrCat(NameOf(cause.worker), " has been silent for ", absl::FormatDuration(options_.heartbeat_timeout),
                             " while ", what,
                             info.has_value() && ParseAction(info->activity).ok() ? absl::StrCat("; it was last at ", PlaceOf(*info)) : "",
                             "; is its process stopped?");
      break;
    case Sign::Kind::kLeft:
      message = absl::StrCat(NameOf(cause.worker), " is gone: its stream broke while ", what);
      break;
    case Sign::Kind::kReported:
      code = static_cast<absl::StatusCode>(cause.failure.code());
      message = absl::StrCat(NameOf(cause.worker), " failed while ", what, ": ", cause.failure.message());
      break;
  }
  const auto joins_cause = [&](absl::string_view edge) {
    return std::any_of(members_.begin(), members_.end(), [&](const WorkerInfo& member) {
      return member.id == cause.worker && IsEndOf(member.registration, edge);
    });
  };
  // What the others saw, neighbours first: the edge and the microbatch.
  std::stable_partition(signs.begin(), signs.end(), [&](const Sign& sign) { return joins_cause(sign.failure.edge()); });
  for (const Sign& sign : signs) {
    if (sign.kind != Sign::Kind::kReported || sign.worker == cause.worker || sign.failure.edge().empty()) continue;
    absl::StrAppend(&message, "; ", NameOf(sign.worker), " was at ",
                    Place(sign.failure.action(), sign.failure.edge(), sign.failure.microbatch()));
    return absl::Status(code, message);
  }
  if (cause.kind != Sign::Kind::kReported) {
    // Nobody complained yet: say who waits, a neighbour rather than another.
    std::vector<WorkerInfo> waiting;
    for (const WorkerInfo& member : members_) {
      const std::optional<WorkerInfo> latest = Latest(member.id);
      if (member.id != cause.worker && latest.has_value() && !latest->waiting_for.empty()) waiting.push_back(*latest);
    }
    std::stable_partition(waiting.begin(), waiting.end(), [&](const WorkerInfo& worker) { return joins_cause(worker.waiting_for); });
    if (!waiting.empty()) {
      absl::StrAppend(&message, "; ", NameOf(waiting[0].id), " was at ", PlaceOf(waiting[0]));
    } else if (const auto own = options_.edges.find(cause.worker); own != options_.edges.end() && !own->second.empty()) {
      absl::StrAppend(&message, "; nobody waited on its edge ", absl::StrJoin(own->second, " or "));
    }
  }
  return absl::Status(code, message);
}

}  // namespace moonpipe
