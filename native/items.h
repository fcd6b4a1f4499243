// Work items on threads, and what each pass does with an item.
#pragma once
#include "backward.h"
#include "chosen.h"
#include "forward.h"
#include "masses.h"
#include "ranks.h"
#include "rounded.h"
#include "scores.h"

namespace ISA {

// The batch row and head (one number) of a work item.
INLINE int64_t head_of(const ringtile_call &c, int64_t item) {
    return bisect(c.batch * c.heads - 1, [&](int64_t head) { return c.forward.item_begin[head + 1] <= item; });
}

// One thread's copy of a call, with its own times.
struct Thread {
    ringtile_call c;
    int64_t times[2], began;

    INLINE explicit Thread(const ringtile_call &call) : c(call), times(), began(call.work.times ? nanoseconds() : 0) {
        if (call.work.times) c.work.times = times;
    }

    INLINE void report(int64_t *sums) {
        if (!sums) return;
        times[1] = nanoseconds() - began;
        for (int i = 0; i < 2; i++) __atomic_fetch_add(sums + i, times[i], __ATOMIC_RELAXED);
    }
};

// Run items [first_item, last_item). Each goes to the next free thread, and its result does not depend on which. Every
// thread has `count` numbers of its own memory, and the unit of the policy P. Return 0, or 1 if memory ran out.
template <class P, class Item> int each_item(const ringtile_call &call, int64_t count, Item run) {
    using T = typename P::Number;
    struct Work {
        const ringtile_call &call;
        Item run;
        int64_t bytes, next;
        int failed;
    } work = {call, run, (int64_t)(count * sizeof(T) + 127) / 64 * 64, call.work.first_item, 0};
    auto body = [](void *data) {
        Work &work = *(Work *)data;
        Thread own(work.call);
        T *memory = (T *)allocate_aligned(work.bytes);
        if (!memory) __atomic_store_n(&work.failed, 1, __ATOMIC_RELAXED);
        [[maybe_unused]] typename P::Unit unit;
        int64_t item;
        while (memory && (item = __atomic_fetch_add(&work.next, 1, __ATOMIC_RELAXED)) < work.call.work.last_item)
            work.run(own.c, item, memory);
        free_aligned(memory);
        own.report(work.call.work.times);
    };
    ringtile_parallel(call.threads, body, &work);
    return work.failed;
}

template <class P> int forward(const ringtile_call &call) {
    static_assert(is_forward_policy<P>(), "see products.h");
    using T = typename P::Number;
    bool combine = call.work.phase == RINGTILE_COMBINE;
    return each_item<P>(call, ForwardScratch<P>::size(call), [=](const ringtile_call &c, int64_t item, T *memory) {
        int64_t head = head_of(c, item);
        if (combine) combine_item<P>(c, item, head, memory);
        else forward_item<P>(c, item, head, memory);
    });
}

template <class P> int backward(const ringtile_call &call) {
    static_assert(is_backward_policy<P>(), "see gradients.h");
    using E = typename P::Element;
    using T = typename P::Number;
    bool tiles = call.work.phase >= RINGTILE_HEADS && call.work.phase <= RINGTILE_COLUMNS;
    int64_t numbers = tiles ? BackwardScratch<P>::size(call) : 1;
    return each_item<P>(call, numbers, [](const ringtile_call &c, int64_t item, T *memory) {
        switch (c.work.phase) {
        case RINGTILE_DELTA: delta_item<E, T>(c, item); break;
        case RINGTILE_HEADS: head_item<P>(c, item, memory); break;
        case RINGTILE_ROWS: row_item<P>(c, item, memory); break;
        case RINGTILE_COLUMNS: column_item<P>(c, item, memory); break;
        case RINGTILE_FOLD_ROWS: fold_row<P>(c, item); break;
        default: fold_column<P>(c, item); break;
        }
    });
}

template <class P> int masses(const ringtile_call &call) {
    return each_item<P>(call, MassScratch<P>::size(call), [](const ringtile_call &c, int64_t item, float *memory) {
        mass_item<P>(c, item, memory);
    });
}

// Inline: a set that another one computes these for compiles none of it.
inline int rounded_masses(const ringtile_call &call) {
    return each_item<Plain<float, float>>(call, RoundedScratch::size(call), rounded_item);
}

inline int rounded_scores(const ringtile_call &call) {
    return each_item<Plain<float, float>>(call, ScoreScratch::size(call), score_item);
}

inline int lists(const ringtile_call &call) {
    return each_item<Plain<float, float>>(call, ListScratch::size(call), list_item);
}

}  // namespace ISA
