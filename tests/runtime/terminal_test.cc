#include "moonpipe/runtime/terminal.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <limits>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace moonpipe {
namespace {

using cluster::v1::StepEvent;

StepEvent Event() {
  StepEvent event;
  event.set_step(7);
  event.set_total_steps(200);
  event.set_loss(3.14159);
  event.set_grad_norm(1.23456);
  event.set_learning_rate(1e-3);
  event.set_tokens(24690);
  event.set_trained_labels(100);
  event.set_images(12);
  event.set_samples(16);
  event.set_seconds(2);
  event.set_model_flops(1e9);
  event.set_mfu(0.4117);
  event.set_bubble_ratio(0.123);
  event.set_peak_memory_bytes(504658657);
  event.set_eta_seconds(62);
  return event;
}

TEST(StepLine, IsInTheMannerOfTorchtitan) {
  EXPECT_EQ(StepLine(Event()),
            "step:   7/200  loss:   3.1416  grad_norm:   1.2346  tps:  12,345  mfu:  41.17%  memory:   0.47GiB  "
            "bubble:  12.3%  eta: 1m 02s");
}

TEST(StepLine, SaysWhenThePeakIsUnknown) {
  StepEvent event = Event();
  event.clear_mfu();
  EXPECT_EQ(StepLine(event),
            "step:   7/200  loss:   3.1416  grad_norm:   1.2346  tps:  12,345  mfu: unknown  memory:   0.47GiB  "
            "bubble:  12.3%  eta: 1m 02s");
}

TEST(StepLine, SaysWhyAStepWasSkipped) {
  StepEvent event = Event();
  event.set_skip_reason("not_finite");
  EXPECT_EQ(StepLine(event),
            "step:   7/200  skipped: not_finite                  tps:  12,345  mfu:  41.17%  memory:   0.47GiB  "
            "bubble:  12.3%  eta: 1m 02s");
  EXPECT_EQ(StepLine(event).find("tps:"), StepLine(Event()).find("tps:"));
}

TEST(StepLine, ShowsTinyHugeAndNotFiniteNumbers) {
  StepEvent event = Event();
  event.set_loss(1.5e-7);
  event.set_grad_norm(std::numeric_limits<double>::quiet_NaN());
  EXPECT_THAT(StepLine(event), testing::HasSubstr("loss: 1.50e-07  grad_norm:      nan"));
  event.set_loss(123456789.0);
  event.set_grad_norm(0);
  EXPECT_THAT(StepLine(event), testing::HasSubstr("loss: 1.23e+08  grad_norm:   0.0000"));
}

TEST(StepJson, HasEveryField) {
  EXPECT_EQ(
      StepJson(Event()),
      "{\"step\":7,\"total_steps\":200,\"loss\":3.14159,\"grad_norm\":1.23456,\"learning_rate\":0.001,\"tokens\":24690,"
      "\"trained_labels\":100,\"images\":12,\"samples\":16,\"seconds\":2.0,\"tokens_per_second\":12345.0,"
      "\"model_flops\":1000000000.0,\"mfu\":0.4117,\"bubble_ratio\":0.123,\"peak_memory_bytes\":504658657,"
      "\"skip_reason\":null,\"eta_seconds\":62.0}");
  const auto object = nlohmann::json::parse(StepJson(Event()));
  const auto* descriptor = StepEvent::descriptor();
  for (int i = 0; i < descriptor->field_count(); ++i)
    EXPECT_TRUE(object.contains(descriptor->field(i)->name())) << descriptor->field(i)->name();
}

TEST(StepJson, WhatIsNotFiniteIsNull) {
  StepEvent event = Event();
  event.set_loss(std::numeric_limits<double>::infinity());
  event.clear_mfu();
  event.set_skip_reason("empty");
  const auto object = nlohmann::json::parse(StepJson(event));
  EXPECT_TRUE(object["loss"].is_null());
  EXPECT_TRUE(object["mfu"].is_null());
  EXPECT_EQ(object["skip_reason"], "empty");
}

TEST(ProgressBar, FillsTheWidth) {
  StepEvent event = Event();
  event.set_step(50);
  EXPECT_EQ(ProgressBar(event, 60), " 25% |=====>               | 50/200  loss 3.1416  eta 1m 02s");
  EXPECT_EQ(ProgressBar(event, 60).size(), 60u);
  event.set_step(200);
  event.set_eta_seconds(0);
  EXPECT_EQ(ProgressBar(event, 50), "100% |==============| 200/200  loss 3.1416  eta 0s");
}

TEST(ProgressBar, GivesUpTheBarWhereThereIsNoRoom) {
  EXPECT_EQ(ProgressBar(Event(), 40), "  3% 7/200  loss 3.1416  eta 1m 02s");
  EXPECT_EQ(ProgressBar(Event(), 10), "  3% 7/200");
  EXPECT_EQ(ProgressBar(Event(), 0), "");
}

TEST(ProgressBar, SurvivesAnUnknownTotal) { EXPECT_THAT(ProgressBar(StepEvent(), 60), testing::HasSubstr("0/0")); }

TEST(Format, Durations) {
  EXPECT_EQ(FormatDuration(0), "0s");
  EXPECT_EQ(FormatDuration(59.4), "59s");
  EXPECT_EQ(FormatDuration(59.6), "1m 00s");
  EXPECT_EQ(FormatDuration(3599), "59m 59s");
  EXPECT_EQ(FormatDuration(7500), "2h 05m");
  EXPECT_EQ(FormatDuration(273600), "3d 04h");
  EXPECT_EQ(FormatDuration(-1), "unknown");
  EXPECT_EQ(FormatDuration(std::numeric_limits<double>::infinity()), "unknown");
}

TEST(Format, Counts) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(1000), "1,000");
  EXPECT_EQ(FormatCount(16000000000), "16,000,000,000");
}

TEST(PlanSummary, NamesServicesPartsAndMemory) {
  PlanSummary plan;
  plan.run = "digits";
  plan.model = "kimi_vl, 3 layers";
  plan.services = {{"vision", "vision tower, projector", 300000, 5e8, "cpu"},
                   {"decoder-0", "layers 0-1, embedding", 700000, 1.5e9, "cpu"},
                   {"dataloader", "", 0, 0, ""}};
  plan.parameters = {{"vision", 250000}, {"projector", 50000}, {"decoder", 1200000}};
  plan.active_parameters = 600000;
  plan.steps = 1200;
  plan.microbatches = 4;
  plan.tokens_per_step = 2048;
  plan.schedule = "1f1b";
  plan.peak = "52.1 GFLOP/s (measured)";
  EXPECT_EQ(FormatPlanSummary(plan),
            "run         digits\n"
            "model       kimi_vl, 3 layers\n"
            "parameters  1,500,000 (vision 250,000, projector 50,000, decoder 1,200,000; 600,000 active for a token)\n"
            "step        4 microbatches, at most 2,048 tokens, schedule 1f1b; 1,200 steps\n"
            "peak        52.1 GFLOP/s (measured)\n"
            "service     part                     device       parameters     memory\n"
            "vision      vision tower, projector  cpu             300,000    0.47GiB\n"
            "decoder-0   layers 0-1, embedding    cpu             700,000    1.40GiB\n"
            "dataloader                                                 -          -\n");
}

// All that a printer writes to a pipe.
template <typename Print>
std::string OnPipe(StepOutput output, Print print) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  {
    ProgressPrinter printer(ends[1], output);
    print(printer);
  }
  ::close(ends[1]);
  std::string text(4096, '\0');
  text.resize(static_cast<size_t>(::read(ends[0], text.data(), text.size())));
  ::close(ends[0]);
  return text;
}

TEST(ProgressPrinter, PrintsPlainLinesWhereThereIsNoTerminal) {
  EXPECT_EQ(OnPipe(StepOutput::kText,
                   [](ProgressPrinter& printer) {
                     printer.Step(Event());
                     printer.Line("saved");
                   }),
            StepLine(Event()) + "\nsaved\n");
  EXPECT_EQ(OnPipe(StepOutput::kJson, [](ProgressPrinter& printer) { printer.Step(Event()); }),
            StepJson(Event()) + "\n");
}

TEST(ProgressPrinter, KeepsTheBarBelowTheLinesOfATerminal) {
  const int master = ::posix_openpt(O_RDWR | O_NOCTTY);
  ASSERT_GE(master, 0);
  ASSERT_EQ(::grantpt(master), 0);
  ASSERT_EQ(::unlockpt(master), 0);
  const int terminal = ::open(::ptsname(master), O_RDWR | O_NOCTTY);
  ASSERT_GE(terminal, 0);
  winsize size = {};
  size.ws_row = 24;
  size.ws_col = 61;
  ASSERT_EQ(::ioctl(terminal, TIOCSWINSZ, &size), 0);
  const std::string bar = ProgressBar(Event(), 60), erase = "\r\x1b[K";
  {
    ProgressPrinter printer(terminal, StepOutput::kText);
    printer.Step(Event());
    printer.Line("saved");
  }
  // The terminal turns a line feed into carriage return and line feed.
  const std::string expected = StepLine(Event()) + "\r\n" + bar + erase + "saved\r\n" + bar + erase;
  std::string text;
  char buffer[1024];
  while (text.size() < expected.size()) {
    const ssize_t n = ::read(master, buffer, sizeof(buffer));
    ASSERT_GT(n, 0);
    text.append(buffer, static_cast<size_t>(n));
  }
  EXPECT_EQ(text, expected);
  ::close(terminal);
  ::close(master);
}

}  // namespace
}  // namespace moonpipe
