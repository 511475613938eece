#include "moonpipe/data/tokenizer.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/base/file.h"
#include "tests/data/testing_files.h"

namespace moonpipe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr char kNoSpecialTokens[] = R"({"added_tokens_decoder": {}})";

absl::StatusOr<std::unique_ptr<Tokenizer>> LoadFrom(const std::string& model, const std::string& config = kNoSpecialTokens) {
  const std::string folder = MakeFolder("tokenizer");
  EXPECT_TRUE(WriteFileAtomically(folder + "/tiktoken.model", model).ok());
  EXPECT_TRUE(WriteFileAtomically(folder + "/tokenizer_config.json", config).ok());
  return Tokenizer::Load(folder);
}

std::string AllBytes() {
  std::string lines;
  for (int byte = 0; byte < 256; ++byte) {
    absl::StrAppend(&lines, absl::Base64Escape(std::string(1, static_cast<char>(byte))), " ", byte, "\n");
  }
  return lines;
}

std::unique_ptr<Tokenizer> LoadGolden(const nlohmann::json& tokens) {
  std::string lines;
  for (size_t rank = 0; rank < tokens.size(); ++rank) absl::StrAppend(&lines, tokens[rank].get<std::string>(), " ", rank, "\n");
  auto tokenizer = LoadFrom(lines);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

void ExpectGolden(const Tokenizer& tokenizer, const nlohmann::json& cases) {
  ASSERT_FALSE(cases.empty());
  for (const nlohmann::json& entry : cases) {
    const auto text = entry["text"].get<std::string>();
    const std::vector<int32_t> ids = tokenizer.Encode(text);
    EXPECT_EQ(ids, entry["ids"].get<std::vector<int32_t>>()) << text;
    EXPECT_EQ(tokenizer.Decode(ids), text);
  }
}

TEST(Tokenizer, GivesTheIdsOfTiktokenForTheDigitsVocabulary) { ExpectGolden(*DigitsTokenizer(), ReadGolden("tokenizer.json")["digits"]); }

TEST(Tokenizer, SplitsTextOfManyScriptsWhereTiktokenDoes) {
  const nlohmann::json golden = ReadGolden("tokenizer.json")["pieces"];
  ExpectGolden(*LoadGolden(golden["tokens"]), golden["cases"]);
}

TEST(Tokenizer, MergesInTheOrderOfTiktokenAlsoInLongPieces) {
  const nlohmann::json golden = ReadGolden("tokenizer.json")["merges"];
  ExpectGolden(*LoadGolden(golden["tokens"]), golden["cases"]);
}

TEST(Tokenizer, DecodesBrokenUtf8AsPythonDoes) {
  const auto tokenizer = LoadFrom(AllBytes());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const nlohmann::json golden = ReadGolden("tokenizer.json");
  ASSERT_EQ(golden["decode"].size(), 7u);
  for (const nlohmann::json& entry : golden["decode"]) {
    EXPECT_EQ((*tokenizer)->Decode(entry["ids"].get<std::vector<int32_t>>()), entry["text"].get<std::string>());
  }
}

TEST(Tokenizer, EncodesBrokenUtf8AsTheReplacementCharacter) {
  const auto tokenizer = DigitsTokenizer();
  EXPECT_EQ(tokenizer->Encode("a\xff\xe4\xbd z"), tokenizer->Encode("a\xef\xbf\xbd\xef\xbf\xbd z"));
}

TEST(Tokenizer, NeverMakesASpecialTokenOutOfText) {
  const auto tokenizer = DigitsTokenizer();
  for (const char* name : {"<|media_pad|>", "<|im_end|>", "[BOS]"}) {
    const std::vector<int32_t> ids = tokenizer->Encode(name);
    EXPECT_THAT(ids, testing::Each(testing::Lt(411))) << name;
    EXPECT_EQ(tokenizer->Decode(ids), name);
  }
}

TEST(Tokenizer, KnowsSpecialTokensByName) {
  const auto tokenizer = DigitsTokenizer();
  EXPECT_EQ(*tokenizer->SpecialTokenId("<|media_pad|>"), 421);
  EXPECT_EQ(tokenizer->max_id(), 423);
  EXPECT_EQ(tokenizer->Decode(std::vector<int32_t>{413, 447}), "<|im_end|>\xef\xbf\xbd") << "447 is no token";
  EXPECT_THAT(tokenizer->SpecialTokenId("<|media_pat|>").status().message(), HasSubstr("<|media_pad|>"));
}

TEST(Tokenizer, EncodesAMegabyteOfOneWordInReasonableTime) {
  const auto tokenizer = DigitsTokenizer();
  const std::string text(1 << 20, 'e');
  EXPECT_EQ(tokenizer->Decode(tokenizer->Encode(text)), text);
}

TEST(Tokenizer, CutsRunsOf25000CharactersLikeThePublishedOnes) {
  // With "aa" as a token, 25,001 letters are 12,500 pairs and one letter: with the cut after 25,000 the single one stands last,
  // and 25,001 + 1 letters end in two singles instead of a pair.
  const auto tokenizer = LoadFrom(AllBytes() + "YWE= 256\n");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->Encode(std::string(24999, 'a')).back(), 'a');
  const std::vector<int32_t> ids = (*tokenizer)->Encode(" " + std::string(24999, 'a') + "aaa");
  EXPECT_EQ(ids[0], ' ');
  EXPECT_EQ(ids.back(), 256);
  EXPECT_EQ(ids.size(), 1u + 12500 + 1) << "25,000 letters, and a slice of two";
}

TEST(Tokenizer, NamesTheLineOfAMalformedModel) {
  EXPECT_THAT(LoadFrom(AllBytes() + "!!! 256\n").status().message(), HasSubstr("tiktoken.model: line 257: \"!!!\" is not base64"));
  EXPECT_THAT(LoadFrom(AllBytes() + "YWE=\n").status().message(), HasSubstr("line 257: \"\" is not a rank"));
  EXPECT_THAT(LoadFrom(AllBytes() + "YWE= x\n").status().message(), HasSubstr("\"x\" is not a rank"));
  EXPECT_THAT(LoadFrom(AllBytes() + "AA== 256\n").status().message(), HasSubstr("line 257: the token was already given"));
  EXPECT_THAT(LoadFrom(AllBytes() + "YWE= 300\n").status().message(), HasSubstr("rank 300 in a file of 257 tokens"));
  EXPECT_THAT(LoadFrom("YQ== 0\n").status().message(), HasSubstr("no token for the single byte 0"));
}

TEST(Tokenizer, RefusesAMalformedConfig) {
  EXPECT_THAT(LoadFrom(AllBytes(), "{").status().message(), HasSubstr("tokenizer_config.json: "));
  EXPECT_THAT(LoadFrom(AllBytes(), "{}").status().message(), HasSubstr("added_tokens_decoder"));
  EXPECT_THAT(LoadFrom(AllBytes(), R"({"added_tokens_decoder": {"7": {"content": "x"}}})").status().message(), HasSubstr("id 7 is a rank"));
  EXPECT_THAT(LoadFrom(AllBytes(), R"({"added_tokens_decoder": {"300": {}}})").status().message(), HasSubstr("id 300 has no string"));
  EXPECT_EQ(Tokenizer::Load("/nowhere").status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace moonpipe
