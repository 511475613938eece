// What both ends of a fresh connection say to each other before it becomes an edge. The token never travels: each side proves that
// it knows it by an HMAC-SHA256 over both sides' random challenges.
//
//   listener -> dialer   Challenge: magic, protocol version, 16 random bytes
//   dialer -> listener   Hello: magic, version, length, 16 random bytes, proof, identity (run, edge, generation, workers, direction)
//   listener -> dialer   Reply: magic, status code, proof, message
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace moonpipe {

// Which edge a connection is for; equal on both ends.
struct EdgeIdentity {
  std::string run;
  std::string name;
  uint64_t generation = 0;
  uint32_t sender = 0;
  uint32_t receiver = 0;
  // The worker that dials.
  uint32_t dialer = 0;
};

inline constexpr size_t kChallengeBytes = 24;
inline constexpr size_t kMaxHelloBytes = 4096;
inline constexpr size_t kMaxReplyBytes = 4096;

// INTERNAL if the system gives no random bytes.
absl::StatusOr<std::string> MakeChallenge();
// FAILED_PRECONDITION if it is no challenge or of another protocol version (both numbers).
absl::Status CheckChallenge(absl::string_view challenge);

// INVALID_ARGUMENT if the names together do not fit kMaxHelloBytes.
absl::StatusOr<std::string> MakeHello(const EdgeIdentity& identity, const std::string& token, absl::string_view challenge);
// The length of the whole hello as soon as its head is there, 0 before. FAILED_PRECONDITION if it is none.
absl::StatusOr<size_t> HelloLength(absl::string_view head);
// The listener's judgement. ABORTED for another generation (both numbers), PERMISSION_DENIED if the dialer does not know the token,
// FAILED_PRECONDITION for another run, edge, direction or worker.
absl::Status CheckHello(absl::string_view hello, const EdgeIdentity& expected, const std::string& token,
                        absl::string_view challenge);

std::string MakeReply(const absl::Status& judgement, const std::string& token, absl::string_view challenge,
                      absl::string_view hello);
// The length of the whole reply once its head of kReplyHeadBytes is there. FAILED_PRECONDITION if it is none.
inline constexpr size_t kReplyHeadBytes = 44;
absl::StatusOr<size_t> ReplyLength(absl::string_view head);
// The listener's judgement as its status; PERMISSION_DENIED if it accepts without knowing the token.
absl::Status CheckReply(absl::string_view reply, const std::string& token, absl::string_view challenge,
                        absl::string_view hello);

}  // namespace moonpipe
