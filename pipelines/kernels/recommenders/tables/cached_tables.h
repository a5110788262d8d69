// Tables of a program whose rows are read from a file when they are looked up.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "isa/tables/kernels.h"
#include "recommenders/tables/row_cache.h"

namespace zoo {

constexpr int64_t kPart = 512;  // samples whose rows are read together

class CachedTables {
  public:
    using Table = std::tuple<uintptr_t, int64_t, int64_t>;  // address of the table's array, its offset in the file, bytes of memory for rows

    // The rows of a table that some columns of the ids choose, and where those of kPart samples are in memory.
    struct Rows {
        RowCache cache;
        int64_t column, count;
        Buffer<uint32_t> places;
        const void *memory() const { return cache.memory(); }
        const uint32_t *places_of(int64_t sample) const { return places.data() + sample * count; }
    };

    void open(const std::string &path, const std::vector<Table> &tables) {
        file_ = std::make_shared<DirectReads>(path);
        for (const auto &[address, offset, bytes] : tables) tables_[address] = {offset, bytes};
    }

    // The rows of the table at this address that these columns choose; null for a table in memory.
    const Rows *add(const void *table, int64_t stride, int64_t column, int64_t count) {
        const auto entry = tables_.find(reinterpret_cast<uintptr_t>(table));
        if (entry == tables_.end()) return nullptr;
        const auto [offset, bytes] = entry->second;
        const int64_t most = kPart * count;
        rows_.push_back(std::unique_ptr<Rows>(new Rows{{file_, offset, stride, bytes, most}, column, count, Buffer<uint32_t>(most + kRowsAhead)}));
        return rows_.back().get();
    }

    // Brings the rows of the ids [n, columns] of at most kPart samples into memory.
    void look_up(const uint32_t *ids, int64_t columns, int64_t n) const {
        try {
            for (const auto &table_rows : rows_) {
                table_rows->cache.begin();
                table_rows->cache.look_up(ids + table_rows->column, n, columns, table_rows->count, table_rows->places.data());
                std::fill_n(table_rows->places.data() + n * table_rows->count, kRowsAhead, table_rows->places[n * table_rows->count - 1]);
            }
            file_->wait();
        } catch (...) {
            for (const auto &table_rows : rows_) table_rows->cache.clear();
            throw;
        }
    }

    bool empty() const { return rows_.empty(); }

    // Keeps other calls away until it is destroyed.
    std::unique_lock<std::mutex> lock() const { return empty() ? std::unique_lock<std::mutex>() : std::unique_lock<std::mutex>(busy_); }

    // (looked up, read from the file): rows so far.
    std::pair<int64_t, int64_t> rows() const {
        std::pair<int64_t, int64_t> counts;
        for (const auto &table_rows : rows_) counts.first += table_rows->cache.looked_up(), counts.second += table_rows->cache.missed();
        return counts;
    }

  private:
    std::shared_ptr<DirectReads> file_;
    std::map<uintptr_t, std::pair<int64_t, int64_t>> tables_;  // by address: offset in the file, bytes of memory
    std::vector<std::unique_ptr<Rows>> rows_;
    mutable std::mutex busy_;
};

}  // namespace zoo
