// Runs file.tflite on all examples of inputs.bin and writes outputs.bin: files of the host's current
// folder, which the emulator opens (semihosting). Tensors of an example lie behind each other.
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "operators.h"
#include "tensorflow/lite/micro/micro_interpreter.h"
#include "tensorflow/lite/schema/schema_generated.h"

namespace {

enum { kOpen = 1, kClose = 2, kPrint = 4, kWrite = 5, kRead = 6, kLength = 12, kExit = 32 };

int Host(int operation, const void* arguments) {
  register int r0 asm("r0") = operation;
  register const void* r1 asm("r1") = arguments;
  asm volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
  return r0;
}

template <typename... Words>
int Call(int operation, Words... words) {
  const uint32_t arguments[] = {(uint32_t)words...};
  return Host(operation, arguments);
}

int Open(const char* name, int mode) { return Call(kOpen, name, mode, strlen(name)); }

[[noreturn]] void Stop(const char* why, int code) {
  Host(kPrint, why);
  Call(kExit, 0x20026, code);
  for (;;) {
  }
}

alignas(16) uint8_t arena[ARENA];
alignas(16) uint8_t model[ARENA];

void Run() {
  const int file = Open("file.tflite", 1);
  const uint32_t size = Call(kLength, file);
  if (size > sizeof(model)) Stop("the file is too large", 1);
  Call(kRead, file, model, size);
  tflite::Operators operators;
  tflite::MicroInterpreter interpreter(tflite::GetModel(model), operators, arena, sizeof(arena));
  if (interpreter.AllocateTensors() != kTfLiteOk) Stop("does not start", 1);
  const int inputs = Open("inputs.bin", 1), outputs = Open("outputs.bin", 5);
  uint32_t left = Call(kLength, inputs);
  while (left > 0) {
    for (size_t i = 0; i < interpreter.inputs_size(); ++i) {
      const TfLiteTensor* tensor = interpreter.input(i);
      Call(kRead, inputs, tensor->data.raw, tensor->bytes);
      left -= tensor->bytes;
    }
    if (interpreter.Invoke() != kTfLiteOk) Stop("does not run", 1);
    for (size_t i = 0; i < interpreter.outputs_size(); ++i) {
      const TfLiteTensor* tensor = interpreter.output(i);
      Call(kWrite, outputs, tensor->data.raw, tensor->bytes);
    }
  }
  Call(kClose, outputs);
  Stop("", 0);
}

}  // namespace

extern "C" {

void DebugLog(const char* format, va_list arguments) {
  char text[256];
  vsnprintf(text, sizeof(text), format, arguments);
  Host(kPrint, text);
  if (strcmp(format, "HALTED") == 0) Stop("", 2);  // What assertions print before they wait forever.
}

int DebugVsnprintf(char* to, size_t size, const char* format, va_list arguments) {
  return vsnprintf(to, size, format, arguments);
}

void abort() { Stop("aborted", 2); }

void __assert_func(const char*, int, const char*, const char* what) { Stop(what, 2); }

extern uint32_t stack_top;
void __libc_init_array();
void _init() {}
void _fini() {}

void Reset() {
  *(volatile uint32_t*)0xE000ED88 |= 0xF << 20;  // Floats, and Helium where there is one.
  asm volatile("dsb; isb");
  __libc_init_array();
  Run();
}

void Fault() { Stop("a fault of the processor", 3); }

__attribute__((section(".vectors"), used)) const void* const vectors[16] = {
    &stack_top, (void*)Reset, (void*)Fault, (void*)Fault, (void*)Fault, (void*)Fault, (void*)Fault};
}

namespace tflite {
uint32_t ticks_per_second() { return 1; }
uint32_t GetCurrentTimeTicks() { return 0; }
void InitializeTarget() {}
}  // namespace tflite
