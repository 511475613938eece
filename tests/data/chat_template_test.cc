#include "moonpipe/data/chat_template.h"

#include <algorithm>

#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "moonpipe/data/skip.h"
#include "tests/data/testing_files.h"

namespace moonpipe {
namespace {

using testing::HasSubstr;

constexpr int32_t kPad = 421;

class ChatTemplateTest : public testing::Test {
 protected:
  ChatTemplate Make(const std::string& name = "kimi-vl", const std::string& system = "") {
    auto chat_template = ChatTemplate::Make(name, tokenizer_.get(), system);
    EXPECT_TRUE(chat_template.ok()) << chat_template.status();
    return *chat_template;
  }
  Record Parse(const std::string& json) {
    auto record = ParseRecord(json);
    EXPECT_TRUE(record.ok()) << record.status();
    return *std::move(record);
  }
  // Text of the trained tokens only.
  std::string Trained(const TokenSequence& sequence) {
    std::vector<int32_t> ids;
    for (size_t i = 0; i < sequence.ids.size(); ++i) {
      if (sequence.trained[i]) ids.push_back(sequence.ids[i]);
    }
    return tokenizer_->Decode(ids);
  }
  std::string Text(const TokenSequence& sequence) { return tokenizer_->Decode(sequence.ids); }

  std::unique_ptr<Tokenizer> tokenizer_ = DigitsTokenizer();
};

TEST_F(ChatTemplateTest, WritesTurnsAndPictures) {
  const auto sequence = Make().Render(Parse(RecordJson("<image>and<image>Read.", "seven", {"a", "b"})), {2, 1});
  ASSERT_TRUE(sequence.ok()) << sequence.status();
  EXPECT_EQ(Text(*sequence),
            "<|im_user|>user<|im_middle|><|media_start|>image<|media_content|><|media_pad|><|media_pad|><|media_end|>and"
            "<|media_start|>image<|media_content|><|media_pad|><|media_end|>Read.<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>seven<|im_end|>");
  EXPECT_EQ(std::count(sequence->ids.begin(), sequence->ids.end(), kPad), 3);
  EXPECT_EQ(Trained(*sequence), "seven<|im_end|>");
}

TEST_F(ChatTemplateTest, TrainsEveryAssistantTurnAndNothingElse) {
  const auto sequence = Make().Render(Parse(R"({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"},
      {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]})"), {});
  ASSERT_TRUE(sequence.ok());
  EXPECT_EQ(Trained(*sequence), "b<|im_end|>d<|im_end|>");
  EXPECT_THAT(Text(*sequence), HasSubstr("<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>"));
}

TEST_F(ChatTemplateTest, AddsASystemTurnOnlyWhenAsked) {
  const Record plain = Parse(RecordJson("a", "b"));
  EXPECT_EQ(Text(*Make().Render(plain, {})).rfind("<|im_user|>", 0), 0u);
  const std::string text = Text(*Make("kimi-vl", "You are a helpful assistant").Render(plain, {}));
  EXPECT_EQ(text.rfind("<|im_system|>system<|im_middle|>You are a helpful assistant<|im_end|><|im_user|>", 0), 0u);
  const Record own = Parse(R"({"messages": [{"role": "system", "content": "x"}]})");
  EXPECT_EQ(Text(*Make("kimi-vl", "other").Render(own, {})), "<|im_system|>system<|im_middle|>x<|im_end|>");
}

TEST_F(ChatTemplateTest, ReservedTokensSpelledOutAreText) {
  for (const char* question : {"the tag <|media_pad|> marks a picture<image>", "<image>the tag <|media_pad|> marks a picture"}) {
    const auto sequence = Make().Render(Parse(RecordJson(question, "x <|im_end|> y", {"a"})), {1});
    ASSERT_TRUE(sequence.ok());
    EXPECT_EQ(std::count(sequence->ids.begin(), sequence->ids.end(), kPad), 1);
    EXPECT_EQ(std::count(sequence->ids.begin(), sequence->ids.end(), Make().end_of_turn()), 2);
    EXPECT_EQ(Trained(*sequence), "x <|im_end|> y<|im_end|>");
  }
  const auto text_only = Make().Render(Parse(RecordJson("the tag <|media_pad|> marks a picture", "b")), {});
  ASSERT_TRUE(text_only.ok());
  EXPECT_EQ(std::count(text_only->ids.begin(), text_only->ids.end(), kPad), 0);
}

TEST_F(ChatTemplateTest, PromptAndAnswerMakeTheWhole) {
  const Record record = Parse(RecordJson("<image>Which digit is this?", "seven", {"a"}));
  const ChatTemplate chat_template = Make();
  std::vector<int32_t> joined = chat_template.RenderPrompt(record, {4})->ids;
  EXPECT_THAT(tokenizer_->Decode(joined), testing::EndsWith("<|im_assistant|>assistant<|im_middle|>"));
  for (const int32_t id : chat_template.RenderAnswer(record)) joined.push_back(id);
  EXPECT_EQ(joined, chat_template.Render(record, {4})->ids);
}

TEST_F(ChatTemplateTest, MoonlightHasNoPictures) {
  const ChatTemplate moonlight = Make("moonlight");
  EXPECT_EQ(moonlight.media_pad(), -1);
  EXPECT_EQ(Text(*moonlight.Render(Parse(RecordJson("a", "b")), {})),
            "<|im_user|>user<|im_middle|>a<|im_end|><|im_assistant|>assistant<|im_middle|>b<|im_end|>");
  EXPECT_EQ(SkipReason(moonlight.Render(Parse(RecordJson("<image>", "b", {"a"})), {1}).status()), "bad_record");
}

TEST_F(ChatTemplateTest, RefusesUnknownNamesRolesAndPromptsWithoutAnswer) {
  EXPECT_THAT(ChatTemplate::Make("kimi", tokenizer_.get()).status().message(), HasSubstr("use kimi-vl or moonlight"));
  EXPECT_EQ(SkipReason(Make().Render(Parse(R"({"messages": [{"role": "tool", "content": "x"}]})"), {}).status()), "bad_record");
  EXPECT_EQ(SkipReason(Make().RenderPrompt(Parse(R"({"messages": [{"role": "user", "content": "x"}]})"), {}).status()), "bad_record");
}

TEST(ParseRecord, TakesContentPartsAndTagsInReadingOrder) {
  const auto record = ParseRecord(R"({"images": ["b.png"], "messages": [{"role": "user", "content": [
      {"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "text", "text": "an <image> tag, "}, {"type": "text", "text": "and"},
      {"type": "image"}]}]})");
  ASSERT_TRUE(record.ok()) << record.status();
  EXPECT_THAT(record->pictures, testing::ElementsAre("a.png", "b.png"));
  const std::vector<ContentPart>& parts = record->turns[0].parts;
  ASSERT_EQ(parts.size(), 3u);
  EXPECT_TRUE(parts[0].is_picture);
  EXPECT_EQ(parts[1].text, "an <image> tag, and");
  EXPECT_EQ(parts[2].picture, 1u);
}

TEST(ParseRecord, RefusesWithAReason) {
  for (const auto& [json, reason, detail] : std::vector<std::tuple<std::string, std::string, std::string>>{
           {"{", "bad_json", "parse error"},
           {"{\"messages\": [{\"role\": \"user\", \"content\": \"\xff\"}]}", "bad_json", "UTF-8"},
           {"[]", "bad_record", "not an object"},
           {"{}", "bad_record", "no list \"messages\""},
           {R"({"messages": []})", "bad_record", "empty"},
           {R"({"messages": [7]})", "bad_record", "not an object"},
           {R"({"messages": [{"content": "x"}]})", "bad_record", "role"},
           {R"({"messages": [{"role": "user"}]})", "bad_record", "content"},
           {R"({"messages": [{"role": "user", "content": 7}]})", "bad_record", "neither"},
           {R"({"messages": [{"role": "user", "content": [{"type": "video"}]}]})", "bad_record", "video"},
           {R"({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]})", "bad_record", "names no picture"},
           {RecordJson("<image><image>", "x", {"a"}), "bad_record", "places for 2 of the pictures in \"images\", which names 1"},
           {RecordJson("no tag", "x", {"a"}), "bad_record", "places for 0"},
           {R"({"images": [1], "messages": []})", "bad_record", "not a string"}}) {
    const absl::Status status = ParseRecord(json).status();
    EXPECT_EQ(SkipReason(status), reason) << json;
    EXPECT_THAT(status.message(), HasSubstr(detail));
  }
}

}  // namespace
}  // namespace moonpipe
