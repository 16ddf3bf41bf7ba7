// The segments of rows (segments.rs).

// The rows `first..end` of segment `number`. Rows of padding have the number -1, and end where padding ends.
struct Segment { int number, first, end; };

// `count` segments of `rows` rows. If `at` is null, their lengths are equal. Otherwise segment `n` has the rows `at[n]..at[n + 1]`.
struct Segments {
    const int* at;
    int count, rows;

    // Return the rows of segment `n`.
    __device__ __forceinline__ int first(int n) const { return at ? at[n] : n * (rows / count); }
    __device__ __forceinline__ int end(int n) const { return at ? at[n + 1] : (n + 1) * (rows / count); }

    // Returns the last segment that begins before or at row `t`, or -1.
    __device__ __forceinline__ int begun(int t) const {
        // In a batch of decode steps, each segment is one row, and row `t` is segment `t`.
        const int likely = min(t, count - 1);
        if (likely >= 0 && at[likely] <= t && t < at[likely + 1]) return likely;
        int low = -1, high = count;
        while (high - low > 1) {
            const int middle = (low + high) / 2;
            if (at[middle] <= t) low = middle;
            else high = middle;
        }
        return low;
    }

    // Returns the segment of row `t`, which is below `rows`.
    __device__ __forceinline__ Segment of(int t) const {
        if (!at) {
            const int length = rows / count, number = t / length;
            return {number, number * length, (number + 1) * length};
        }
        const int number = begun(t);
        if (number < 0) return {-1, t, count > 0 ? min(at[0], rows) : rows};
        const int end = min(at[number + 1], rows);
        return t < end ? Segment{number, at[number], end} : Segment{-1, t, rows};
    }
};
