// The cards of the NVML stub, shared by its two libraries. README.md describes them.
#pragma once

#include <stdbool.h>

// Only the functions that NVIDIA's libraries export are visible from outside.
#define EXPORT __attribute__((visibility("default")))

// A figure that NVML does not report for a card.
#define NOT_REPORTED (-1)

enum { MAX_CARDS = 16, MAX_PROCESSES = 256, MAX_NAME = 256 };

// A model of a card with its figures. Units are in the names.
struct Model {
    const char *key, *name;
    bool is_mig;
    unsigned compute_major, compute_minor, multiprocessors;
    // Memory as NVML counts it, the part that the driver reserves, and memory as CUDA counts it.
    long total_mib, reserved_mib, cuda_mib;
    bool has_memory, has_process_memory, has_process_names;
    int celsius, slowdown_celsius;
    int milliwatts, milliwatts_set, milliwatts_default;
    int clock_mhz, clock_mhz_max, memory_clock_mhz;
    int busy_percent;
    int throttle_bits;
    int generation_max, lanes_max, generation, lanes;
    int drives_display;
    // Lines of a process file without the number of the card.
    const char *processes;
};

// A card of this machine. The handles of NVML point to cards.
struct Card {
    const struct Model *model;
    int number;
    // The whole GPU of a MIG partition, else null.
    struct Card *whole;
};

struct Process {
    unsigned pid;
    // Negative if the driver does not report it.
    long mib;
    bool computes, draws;
    char name[MAX_NAME];
};

int card_count(void);
struct Card *card(int number);
// Writes the 16 bytes of a card's UUID.
void uuid_of(const struct Card *card, unsigned char uuid[16]);
// Reads the processes on a card now, and returns their number.
int processes_on(const struct Card *card, struct Process list[MAX_PROCESSES]);
