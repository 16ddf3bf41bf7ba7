//! A number over the steps of a run, in a bounded number of buckets.

use serde::Serialize;

/// The maximum number of buckets of a series, about the number of pixels of a chart.
pub const MOST_BUCKETS: usize = 1024;

/// The values of neighbouring steps.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Bucket {
    /// The step of the last value.
    step: u64,
    low: f64,
    high: f64,
    sum: f64,
    count: u64,
    /// The revision of the last change.
    revision: u64,
}

impl Bucket {
    fn of(step: u64, value: f64, revision: u64) -> Bucket {
        Bucket { step, low: value, high: value, sum: value, count: 1, revision }
    }

    fn merge(&mut self, next: &Bucket) {
        self.step = next.step;
        (self.low, self.high) = (self.low.min(next.low), self.high.max(next.high));
        (self.sum, self.count) = (self.sum + next.sum, self.count + next.count);
        self.revision = next.revision;
    }
}

/// A number over steps. Each step has its own bucket up to [`MOST_BUCKETS`] buckets. Then the number of steps per bucket doubles.
#[derive(Clone, Debug)]
pub struct Series {
    /// The number of steps of a bucket, a power of two.
    width: u64,
    buckets: Vec<Bucket>,
    /// The revision at which all buckets last changed.
    reset: u64,
    /// The number of values that were not finite.
    not_finite: u64,
}

/// The part of a series that a reader lacks. Its buckets replace the buckets of the reader from number `from` on.
///
/// A bucket has the step of its last value, and the mean of its values. `low` and `high` are absent if each bucket has one value.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Part {
    from: usize,
    steps: Vec<u64>,
    means: Vec<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    low: Option<Vec<f32>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    high: Option<Vec<f32>>,
    /// The number of steps of a bucket.
    width: u64,
    /// The number of values that were not finite. No bucket contains them.
    not_finite: u64,
}

impl Series {
    /// Returns a series without values at `revision`. Readers of an earlier revision must discard their values.
    pub fn new(revision: u64) -> Series {
        Series { width: 1, buckets: Vec::new(), reset: revision, not_finite: 0 }
    }

    /// Appends the value of `step`. Steps must not decrease. `None` is a number that was not finite, which is null in JSON.
    pub fn push(&mut self, step: u64, value: Option<f64>, revision: u64) {
        let Some(value) = value else {
            self.not_finite += 1;
            return;
        };
        let next = Bucket::of(step, value, revision);
        match self.buckets.last_mut() {
            Some(last) if last.step / self.width == step / self.width => last.merge(&next),
            _ => self.buckets.push(next),
        }
        if self.buckets.len() > MOST_BUCKETS {
            self.halve(revision);
        }
    }

    /// Removes the values of `step` and later steps, since a resumed run trains these steps again. Earlier values in the bucket of `step` are lost.
    pub fn cut(&mut self, step: u64, revision: u64) {
        self.buckets.retain(|bucket| bucket.step < step);
        self.reset = revision;
    }

    /// Joins buckets until a quarter of the maximum number is free.
    fn halve(&mut self, revision: u64) {
        while self.buckets.len() > MOST_BUCKETS * 3 / 4 {
            self.width *= 2;
            let width = self.width;
            let mut joined: Vec<Bucket> = Vec::with_capacity(self.buckets.len());
            for next in &self.buckets {
                match joined.last_mut() {
                    Some(last) if last.step / width == next.step / width => last.merge(next),
                    _ => joined.push(*next),
                }
            }
            self.buckets = joined;
        }
        self.reset = revision;
    }

    /// Returns the buckets that a reader lacks that has read everything up to revision `since`. Returns `None` if it lacks nothing.
    pub fn since(&self, since: u64) -> Option<Part> {
        let from = match since < self.reset {
            true => 0,
            false => self.buckets.partition_point(|bucket| bucket.revision <= since),
        };
        let new = &self.buckets[from..];
        if new.is_empty() && since >= self.reset {
            return None;
        }
        let column = |of: fn(&Bucket) -> f64| new.iter().map(|bucket| of(bucket) as f32).collect::<Vec<_>>();
        let spread = self.buckets.iter().any(|bucket| bucket.count > 1);
        Some(Part {
            from,
            steps: new.iter().map(|bucket| bucket.step).collect(),
            means: column(|bucket| bucket.sum / bucket.count as f64),
            low: spread.then(|| column(|bucket| bucket.low)),
            high: spread.then(|| column(|bucket| bucket.high)),
            width: self.width,
            not_finite: self.not_finite,
        })
    }

    /// Returns the mean of the last bucket.
    pub fn last(&self) -> Option<f64> {
        self.buckets.last().map(|bucket| bucket.sum / bucket.count as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The buckets of a series on a page.
    #[derive(Default)]
    struct Page(Vec<(u64, f32, f32, f32)>);

    impl Page {
        fn take(&mut self, part: Option<Part>) {
            let Some(part) = part else { return };
            self.0.truncate(part.from);
            for i in 0..part.steps.len() {
                let mean = part.means[i];
                let of = |column: &Option<Vec<f32>>| column.as_ref().map_or(mean, |column| column[i]);
                self.0.push((part.steps[i], mean, of(&part.low), of(&part.high)));
            }
        }
    }

    #[test]
    fn parts_add_up_to_the_whole_and_extremes_survive() {
        let mut series = Series::new(1);
        let (mut page, mut seen) = (Page::default(), 0);
        let value = |step: u64| if step == 70_001 { 9e5 } else { (step % 7) as f64 - 3.0 };
        for step in 1..=100_000_u64 {
            series.push(step, Some(value(step)), step);
            if step % 977 == 0 || step < 9 {
                page.take(series.since(seen));
                seen = step;
            }
        }
        page.take(series.since(seen));
        let mut whole = Page::default();
        whole.take(series.since(0));
        assert_eq!(page.0, whole.0, "what was sent in parts equals what is sent at once");
        assert!(whole.0.len() <= MOST_BUCKETS && whole.0.len() > MOST_BUCKETS / 2, "{}", whole.0.len());
        assert_eq!(whole.0.last().unwrap().0, 100_000);
        let high = whole.0.iter().map(|point| point.3).fold(f32::MIN, f32::max);
        let low = whole.0.iter().map(|point| point.2).fold(f32::MAX, f32::min);
        assert_eq!((low, high), (-3.0, 9e5), "a spike of one step of 100,000 is seen");
        assert_eq!(series.since(100_000), None, "a page that has everything gets nothing");
    }

    #[test]
    fn values_that_are_not_finite_are_counted() {
        let mut series = Series::new(1);
        for (step, value) in [(1, Some(1.5)), (2, None), (3, Some(2.5))] {
            series.push(step, value, 1);
        }
        let part = series.since(0).unwrap();
        assert_eq!((part.steps, part.means, part.not_finite), (vec![1, 3], vec![1.5, 2.5], 1));
        assert_eq!((part.low, series.last()), (None, Some(2.5)));
    }
}
