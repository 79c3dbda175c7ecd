// Queued work of the stand-in. It runs late, in an order that streams and events allow and the seed chooses.

#include "driver.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace stand_in {

namespace {

// The work that runs now, for the message of a process that dies in it.
const char* volatile running = nullptr;

double now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

void on_fault(int, siginfo_t* info, void*) {
    char text[256];
    Address at = (Address)info->si_addr;
    bool device = is_device(at);
    const char* what = running ? running : device ? "the host" : "something";
    int length = snprintf(text, sizeof text, "%s: %s touched %#llx, which is %s\n", NAME, what, (unsigned long long)at,
                          device && !running ? "device memory" : "nothing that it may touch");
    if (write(2, text, length) < 0) _exit(139);
    signal(SIGSEGV, SIG_DFL);
    raise(SIGSEGV);
}

bool may_run(const Item& item) { return !(item.wait && !item.wait->done) && !(item.may && !item.may()); }

// Whether a context's streams wait for something outside this call.
bool is_held_up(Context* context) {
    for (Stream* stream : context->streams)
        if (!stream->items.empty() && stream->items.front().may) return true;
    return false;
}

// Streams with a first item that may run now.
std::vector<Stream*> ready() {
    std::vector<Stream*> list;
    for (Context* context : contexts) {
        std::vector<Stream*> all = context->streams;
        all.push_back(&context->null);
        for (Stream* stream : all)
            if (!stream->items.empty() && may_run(stream->items.front())) list.push_back(stream);
    }
    return list;
}

void run_one(Stream* stream) {
    Item item = std::move(stream->items.front());
    stream->items.pop_front();
    if (item.work && lost == OK) {
        running = item.name.c_str();
        item.work();
        running = nullptr;
    }
    if (item.record) {
        item.record->done = true;
        item.record->seconds = now();
    }
}

bool idle(Context* context) {
    if (!context->null.items.empty()) return false;
    for (Stream* stream : context->streams)
        if (!stream->items.empty()) return false;
    return true;
}

}  // namespace

void watch_faults() {
    static char alternate[64 << 10];
    stack_t alternate_stack = {};
    alternate_stack.ss_sp = alternate;
    alternate_stack.ss_size = sizeof alternate;
    sigaltstack(&alternate_stack, nullptr);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

// Runs one item of some stream. With even odds the stream that ran last continues, so that streams get far ahead of
// others.
bool run_any() {
    static Stream* last = nullptr;
    std::vector<Stream*> list = ready();
    if (list.empty()) return false;
    bool again = draws()() % 2 && std::find(list.begin(), list.end(), last) != list.end();
    last = again ? last : list[draws()() % list.size()];
    Open open;
    run_one(last);
    return true;
}

int run_until(const std::function<bool()>& done) {
    Open open;
    while (!done()) {
        if (lost != OK) return lost;
        if (!run_any()) die("the host waits for work that was never queued, or that depends on other ranks");
    }
    check_canaries();
    return lost;
}

int drain(Context* context) {
    return run_until([&] { return idle(context); });
}

int drain_all() {
    // Work that waits for other ranks is skipped: the caller does not have to wait for it.
    for (Context* context : contexts)
        if (int code = run_until([&] { return idle(context) || (ready().empty() && is_held_up(context)); })) return code;
    return lost;
}

int lose(const char* why) {
    fprintf(stderr, "%s: %s\n", NAME, why);
    lost = atoi(setting("LOST_CODE", "719").c_str());
    for (Context* context : contexts) {
        context->null.items.clear();
        for (Stream* stream : context->streams) stream->items.clear();
    }
    return lost;
}

void die(const std::string& what) {
    fprintf(stderr, "%s: %s%s%s\n", NAME, what.c_str(), running ? ", in " : "", running ? running : "");
    abort();
}

std::mt19937_64& draws() {
    static std::mt19937_64 draws(strtoull(setting("SEED", "1").c_str(), nullptr, 10));
    return draws;
}

Stream* stream_of(void* handle) {
    Context* context = current();
    if (!context) return nullptr;
    if ((uintptr_t)handle <= 2) {
        // The null stream waits for blocking streams, and they for it.
        for (Stream* stream : context->streams)
            if (stream->blocking && run_until([&] { return stream->items.empty(); }) != OK) break;
        return &context->null;
    }
    for (Context* context : contexts)
        for (Stream* stream : context->streams)
            if (stream == handle) {
                if (stream->blocking) run_until([&] { return stream->context->null.items.empty(); });
                return stream;
            }
    return nullptr;
}

int enqueue(void* handle, std::string name, std::function<void()> work) {
    if (lost != OK) return lost;
    if (!current()) return INVALID_CONTEXT;
    Stream* stream = stream_of(handle);
    if (!stream) return INVALID_HANDLE;
    stream->items.push_back({std::move(name), std::move(work), nullptr, nullptr, nullptr});
    // Real queues have bounded length, too.
    while (stream->items.size() > 1024 && run_any()) {}
    return lost;
}

int enqueue_when(void* handle, std::string name, std::function<bool()> may, std::function<void()> work) {
    if (int code = enqueue(handle, std::move(name), std::move(work))) return code;
    stream_of(handle)->items.back().may = std::move(may);
    return OK;
}

int finish(Stream* stream) {
    return run_until([&] { return stream->items.empty(); });
}

}  // namespace stand_in
