#include "moonpipe/comm/edge_handshake.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "moonpipe/base/status_macros.h"

namespace moonpipe {
namespace {

constexpr uint32_t kMagic = 0x3148504d;  // "MPH1"
constexpr uint32_t kVersion = 1;
constexpr size_t kNonceBytes = 16;
constexpr size_t kProofBytes = 32;
// magic, version, length, nonce, proof
constexpr size_t kHelloHeadBytes = 12 + kNonceBytes + kProofBytes;
static_assert(kReplyHeadBytes == 12 + kProofBytes);

template <typename T>
void Append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

void AppendText(std::string& out, absl::string_view text) {
  Append(out, static_cast<uint32_t>(text.size()));
  out.append(text.data(), text.size());
}

template <typename T>
bool Take(absl::string_view& in, T& value) {
  if (in.size() < sizeof value) return false;
  std::memcpy(&value, in.data(), sizeof value);
  in.remove_prefix(sizeof value);
  return true;
}

bool TakeText(absl::string_view& in, std::string& text) {
  uint32_t size;
  if (!Take(in, size) || in.size() < size) return false;
  text = std::string(in.substr(0, size));
  in.remove_prefix(size);
  return true;
}

uint32_t NumberAt(absl::string_view bytes, size_t offset) {
  uint32_t value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

absl::StatusOr<std::string> RandomBytes() {
  std::string bytes(kNonceBytes, '\0');
  if (RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), kNonceBytes) != 1) {
    return absl::InternalError("the system gives no random bytes for the handshake of an edge");
  }
  return bytes;
}

// `side` keeps a proof of one side from serving as the other's.
std::string Proof(absl::string_view side, const std::string& token, absl::string_view challenge, absl::string_view rest) {
  const std::string text = absl::StrCat(side, challenge, rest);
  std::string proof(kProofBytes, '\0');
  unsigned int length = kProofBytes;
  HMAC(EVP_sha256(), token.data(), static_cast<int>(token.size()), reinterpret_cast<const unsigned char*>(text.data()),
       text.size(), reinterpret_cast<unsigned char*>(proof.data()), &length);
  return proof;
}

bool SameProof(absl::string_view a, absl::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

absl::Status CheckHead(absl::string_view bytes, absl::string_view what) {
  if (bytes.size() < 4 || NumberAt(bytes, 0) != kMagic) {
    return absl::FailedPreconditionError(absl::StrCat("peer does not speak the edge protocol (no ", what, ")"));
  }
  return absl::OkStatus();
}

absl::Status CheckVersion(uint32_t version) {
  if (version == kVersion) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("peer speaks edge protocol ", version, ", this program ", kVersion,
                                                    "; run the same release on every worker"));
}

std::string EncodeIdentity(const EdgeIdentity& identity) {
  std::string bytes;
  Append(bytes, identity.generation);
  Append(bytes, identity.sender);
  Append(bytes, identity.receiver);
  Append(bytes, identity.dialer);
  AppendText(bytes, identity.run);
  AppendText(bytes, identity.name);
  return bytes;
}

std::string Describe(const EdgeIdentity& identity) {
  return absl::StrCat("run \"", identity.run, "\" edge \"", identity.name, "\" from worker ", identity.sender, " to worker ",
                      identity.receiver, " dialed by worker ", identity.dialer);
}

}  // namespace

absl::StatusOr<std::string> MakeChallenge() {
  std::string challenge;
  Append(challenge, kMagic);
  Append(challenge, kVersion);
  MOONPIPE_ASSIGN_OR_RETURN(const std::string nonce, RandomBytes());
  challenge += nonce;
  static_assert(kChallengeBytes == 8 + kNonceBytes);
  return challenge;
}

absl::Status CheckChallenge(absl::string_view challenge) {
  MOONPIPE_RETURN_IF_ERROR(CheckHead(challenge, "challenge"));
  return CheckVersion(NumberAt(challenge, 4));
}

absl::StatusOr<std::string> MakeHello(const EdgeIdentity& identity, const std::string& token, absl::string_view challenge) {
  const std::string body = EncodeIdentity(identity);
  const size_t length = kHelloHeadBytes + body.size();
  if (length > kMaxHelloBytes) {
    return absl::InvalidArgumentError(absl::StrCat("names of run and edge make a handshake of ", length,
                                                   " bytes, at most ", kMaxHelloBytes, " are allowed"));
  }
  MOONPIPE_ASSIGN_OR_RETURN(const std::string nonce, RandomBytes());
  std::string hello;
  Append(hello, kMagic);
  Append(hello, kVersion);
  Append(hello, static_cast<uint32_t>(length));
  hello += nonce;
  hello += Proof("dialer", token, challenge, absl::StrCat(hello, body));
  hello += body;
  return hello;
}

absl::StatusOr<size_t> HelloLength(absl::string_view head) {
  if (head.size() >= 4) MOONPIPE_RETURN_IF_ERROR(CheckHead(head, "hello"));
  if (head.size() < 12) return size_t{0};
  MOONPIPE_RETURN_IF_ERROR(CheckVersion(NumberAt(head, 4)));
  const uint32_t length = NumberAt(head, 8);
  if (length < kHelloHeadBytes || length > kMaxHelloBytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("peer tells a hello of ", length, " bytes, at most ", kMaxHelloBytes, " are allowed"));
  }
  return size_t{length};
}

absl::Status CheckHello(absl::string_view hello, const EdgeIdentity& expected, const std::string& token,
                        absl::string_view challenge) {
  MOONPIPE_ASSIGN_OR_RETURN(const size_t length, HelloLength(hello));
  if (length == 0 || length != hello.size()) {
    return absl::FailedPreconditionError(absl::StrCat("hello has ", hello.size(), " bytes but tells ", length));
  }
  const absl::string_view head = hello.substr(0, 12 + kNonceBytes);
  const absl::string_view proof = hello.substr(12 + kNonceBytes, kProofBytes);
  absl::string_view body = hello.substr(kHelloHeadBytes);
  const absl::string_view whole_body = body;
  EdgeIdentity told;
  if (!Take(body, told.generation) || !Take(body, told.sender) || !Take(body, told.receiver) || !Take(body, told.dialer) ||
      !TakeText(body, told.run) || !TakeText(body, told.name) || !body.empty()) {
    return absl::FailedPreconditionError("hello is cut or has bytes left over");
  }
  // The generation comes first: a worker of an older plan has an older token too and should hear the true reason.
  if (told.generation != expected.generation) {
    return absl::AbortedError(absl::StrCat("peer is of generation ", told.generation, ", this edge of generation ",
                                           expected.generation, told.generation < expected.generation ? "; it is stale" : ""));
  }
  if (!SameProof(proof, Proof("dialer", token, challenge, absl::StrCat(head, whole_body)))) {
    return absl::PermissionDeniedError("peer does not know the token of this edge");
  }
  const std::string got = Describe(told);
  const std::string wanted = Describe(expected);
  if (got != wanted) {
    return absl::FailedPreconditionError(absl::StrCat("peer connects for ", got, ", this end is for ", wanted));
  }
  return absl::OkStatus();
}

std::string MakeReply(const absl::Status& judgement, const std::string& token, absl::string_view challenge,
                      absl::string_view hello) {
  const absl::string_view message = absl::string_view(judgement.message()).substr(0, kMaxReplyBytes - kReplyHeadBytes);
  std::string reply;
  Append(reply, kMagic);
  Append(reply, static_cast<uint32_t>(judgement.code()));
  Append(reply, static_cast<uint32_t>(message.size()));
  // A refused peer gets no proof: it would be an oracle.
  reply += judgement.ok() ? Proof("listener", token, challenge, hello) : std::string(kProofBytes, '\0');
  absl::StrAppend(&reply, message);
  return reply;
}

absl::StatusOr<size_t> ReplyLength(absl::string_view head) {
  MOONPIPE_RETURN_IF_ERROR(CheckHead(head, "reply"));
  const size_t length = kReplyHeadBytes + NumberAt(head, 8);
  if (head.size() < kReplyHeadBytes || length > kMaxReplyBytes) {
    return absl::FailedPreconditionError(
        absl::StrCat("peer tells a reply of ", length, " bytes, at most ", kMaxReplyBytes, " are allowed"));
  }
  return length;
}

absl::Status CheckReply(absl::string_view reply, const std::string& token, absl::string_view challenge,
                        absl::string_view hello) {
  const uint32_t code = NumberAt(reply, 4);
  if (code != 0) {
    return absl::Status(static_cast<absl::StatusCode>(code), reply.substr(kReplyHeadBytes));
  }
  if (!SameProof(reply.substr(12, kProofBytes), Proof("listener", token, challenge, hello))) {
    return absl::PermissionDeniedError("listener does not know the token of this edge");
  }
  return absl::OkStatus();
}

}  // namespace moonpipe
