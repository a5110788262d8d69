// Rows of a table in a file, the often used ones of them in memory: ids in, numbers of rows in `memory` out. Sets of twelve rows share a cache line of tags and
// of counts of their uses; a new row takes the place of the least used one of its set.
#pragma once
#include <memory>

#include "recommenders/tables/direct_reads.h"

namespace zoo {

class RowCache {
  public:
    // offset: of the table in the file; bytes: of the memory for rows and their tags; most: ids of one `look_up`.
    RowCache(std::shared_ptr<DirectReads> file, int64_t offset, int64_t stride, int64_t bytes, int64_t most)
        : file_(std::move(file)), offset_(offset), stride_(stride), most_(most) {
        sets_ = std::clamp<int64_t>(bytes / (kWays * stride + static_cast<int64_t>(sizeof(Set))), 1, (INT32_MAX - most) / kWays);
        tags_ = static_cast<Set *>(memory_.take(sets_ * static_cast<int64_t>(sizeof(Set))));
        rows_ = static_cast<uint8_t *>(memory_.take((sets_ * kWays + most) * stride + kSlack));
        clear();
    }

    const uint8_t *memory() const { return rows_; }

    // Forgets all rows, as those that could not be read.
    void clear() {
        std::fill_n(tags_, sets_, Set{});
        taken_.clear(), beyond_ = 0;
    }

    // Frees the rows of the calls before.
    void begin() {
        for (uint8_t *uses : taken_) *uses &= kUses;
        taken_.clear(), beyond_ = 0;
    }

    // Writes the row numbers in `memory` of ids, at most `most` since `begin`; the rows are there after the `wait` of the file.
    void look_up(const uint32_t *ids, int64_t n, int64_t ids_stride, int64_t count, uint32_t *rows) {
        constexpr int64_t kAhead = 8;
        for (int64_t s = 0; s < n; ++s)
            for (int64_t c = 0; c < count; ++c) {
                if (s + kAhead < n) __builtin_prefetch(tags_ + set_of(ids[(s + kAhead) * ids_stride + c]), 1);
                rows[s * count + c] = row_of(ids[s * ids_stride + c]);
            }
    }

    int64_t looked_up() const { return looked_up_; }
    int64_t missed() const { return missed_; }

  private:
    static constexpr int64_t kWays = 12, kSlack = 64, kAge = 64;
    static constexpr uint8_t kTaken = 0x80, kUses = 0x7f;  // a row of the present call, and how often a row was used
    struct alignas(64) Set {
        uint32_t tags[kWays];  // id + 1
        uint8_t uses[kWays];
        uint32_t misses;  // since the counts were halved
    };

    int64_t set_of(uint32_t id) const { return static_cast<int64_t>((uint64_t{id * 2654435761u} * static_cast<uint64_t>(sets_)) >> 32); }

    uint32_t row_of(uint32_t id) {
        const int64_t number = set_of(id);
        Set &set = tags_[number];
        const uint32_t tag = id + 1;
        ++looked_up_;
        uint32_t matches = 0;
        for (int64_t w = 0; w < kWays; ++w) matches |= static_cast<uint32_t>(set.tags[w] == tag) << w;
        int64_t way;
        if (matches) {
            way = __builtin_ctz(matches);
            uint8_t &uses = set.uses[way];
            if ((uses & kUses) == kUses) halve(set);
            ++uses;
            if (!(uses & kTaken)) take(uses);
        } else {
            ++missed_;
            way = least_used(set);
            if (way < 0) {  // all rows of the set belong to the present call
                const int64_t row = sets_ * kWays + beyond_++;
                fetch(id, row);
                return static_cast<uint32_t>(row);
            }
            if (++set.misses == kAge) halve(set);
            set.tags[way] = tag, set.uses[way] = 1;
            take(set.uses[way]);
            fetch(id, number * kWays + way);
        }
        return static_cast<uint32_t>(number * kWays + way);
    }

    static void halve(Set &set) {
        set.misses = 0;
        for (uint8_t &uses : set.uses) uses = static_cast<uint8_t>((uses & kTaken) | ((uses & kUses) >> 1));
    }

    static int64_t least_used(const Set &set) {
        int64_t way = -1, least = kTaken;
        for (int64_t w = 0; w < kWays; ++w)
            if (set.uses[w] < least) way = w, least = set.uses[w];
        return way;
    }

    void take(uint8_t &uses) { uses |= kTaken, taken_.push_back(&uses); }

    void fetch(uint32_t id, int64_t row) { file_->read(offset_ + int64_t{id} * stride_, stride_, rows_ + row * stride_); }

    std::shared_ptr<DirectReads> file_;
    int64_t offset_, stride_, most_, sets_, beyond_ = 0, looked_up_ = 0, missed_ = 0;
    Arena memory_;
    Set *tags_;
    uint8_t *rows_;
    std::vector<uint8_t *> taken_;
};

}  // namespace zoo
