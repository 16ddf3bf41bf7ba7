//! Memory accounting of a dry run: allocations hold no data and are counted by scope.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counts the live bytes of a dry-run device, by scope.
#[derive(Debug, Default)]
pub struct MemoryTracker(Mutex<Accounts>);

#[derive(Debug, Default)]
struct Accounts {
    /// The live bytes by scope name, in the order of first use.
    by_scope: Vec<(&'static str, usize)>,
    /// The indices of the open scopes, outermost first.
    open: Vec<usize>,
    /// The number of open scopes that also name the allocations of inner scopes.
    whole: usize,
    live: usize,
    peak: MemorySnapshot,
}

/// The live memory at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemorySnapshot {
    /// The number of live bytes.
    pub bytes: usize,
    /// The outermost scope that was open at that moment.
    pub during: &'static str,
    /// The live bytes by the scope that allocated them.
    pub by_scope: Vec<(&'static str, usize)>,
}

impl Accounts {
    fn account(&mut self, name: &'static str) -> usize {
        let known = self.by_scope.iter().position(|(known, _)| *known == name);
        known.unwrap_or_else(|| {
            self.by_scope.push((name, 0));
            self.by_scope.len() - 1
        })
    }

    fn snapshot(&self) -> MemorySnapshot {
        MemorySnapshot {
            bytes: self.live,
            during: self.open.first().map_or("", |&outermost| self.by_scope[outermost].0),
            by_scope: self.by_scope.iter().filter(|(_, bytes)| *bytes > 0).copied().collect(),
        }
    }
}

impl MemoryTracker {
    fn accounts(&self) -> MutexGuard<'_, Accounts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the peak since the last call (or the start), and resets the peak to the current state.
    pub fn take_peak(&self) -> MemorySnapshot {
        let mut accounts = self.accounts();
        let now = accounts.snapshot();
        std::mem::replace(&mut accounts.peak, now)
    }

    /// Counts `bytes` in the innermost scope until the entry is dropped.
    pub(crate) fn track(self: &Arc<Self>, bytes: usize) -> Entry {
        let mut accounts = self.accounts();
        let account = match accounts.open.last() {
            Some(&innermost) => innermost,
            None => accounts.account("other"),
        };
        accounts.by_scope[account].1 += bytes;
        accounts.live += bytes;
        if accounts.live > accounts.peak.bytes {
            accounts.peak = accounts.snapshot();
        }
        Entry { tracker: self.clone(), account, bytes }
    }

    /// Counts `bytes` of scratch, which a kernel allocates and frees.
    pub(crate) fn scratch(self: &Arc<Self>, bytes: usize) {
        drop(self.track(bytes));
    }

    /// Opens a scope. Allocations are counted under `name` until the scope is dropped, except while an inner scope is open.
    pub(crate) fn scope(self: &Arc<Self>, name: &'static str) -> Scope {
        let mut accounts = self.accounts();
        let outer = accounts.open.last().copied().filter(|_| accounts.whole > 0);
        let account = outer.unwrap_or_else(|| accounts.account(name));
        accounts.open.push(account);
        Scope { tracker: Some(self.clone()), is_whole: false }
    }

    /// Opens a scope that also names the allocations of inner scopes.
    pub(crate) fn whole_scope(self: &Arc<Self>, name: &'static str) -> Scope {
        let mut scope = self.scope(name);
        scope.is_whole = true;
        self.accounts().whole += 1;
        scope
    }
}

/// The live bytes of one allocation.
pub(crate) struct Entry {
    tracker: Arc<MemoryTracker>,
    account: usize,
    bytes: usize,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut accounts = self.tracker.accounts();
        accounts.by_scope[self.account].1 -= self.bytes;
        accounts.live -= self.bytes;
    }
}

/// A scope that names the allocations of a dry run, from [`Device::scope`](crate::Device::scope) until it is dropped. A no-op on real devices.
#[must_use]
pub struct Scope {
    tracker: Option<Arc<MemoryTracker>>,
    is_whole: bool,
}

impl Scope {
    /// The scope on a real device.
    pub(crate) const NONE: Scope = Scope { tracker: None, is_whole: false };
}

impl Drop for Scope {
    fn drop(&mut self) {
        if let Some(tracker) = &self.tracker {
            let mut accounts = tracker.accounts();
            accounts.open.pop();
            accounts.whole -= usize::from(self.is_whole);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_scopes_name_what_inner_scopes_allocate() {
        let tracker = Arc::new(MemoryTracker::default());
        let whole = tracker.whole_scope("whole");
        let inner = tracker.scope("inner");
        let _entry = tracker.track(3);
        drop((inner, whole));
        let _inner = tracker.scope("inner");
        let _entry = tracker.track(5);
        assert_eq!(tracker.take_peak().by_scope, [("whole", 3), ("inner", 5)]);
    }

    #[test]
    fn peak_lists_live_bytes_by_scope() {
        let tracker = Arc::new(MemoryTracker::default());
        let outside = tracker.track(1);
        let outer = tracker.scope("outer");
        let kept = tracker.track(10);
        {
            let _inner = tracker.scope("inner");
            drop(tracker.track(100));
        }
        drop(tracker.track(50));
        drop((outer, outside));
        let by_scope = vec![("other", 1), ("outer", 10), ("inner", 100)];
        assert_eq!(tracker.take_peak(), MemorySnapshot { bytes: 111, during: "outer", by_scope });
        drop(kept);
        assert_eq!(tracker.take_peak(), MemorySnapshot { bytes: 10, during: "", by_scope: vec![("outer", 10)] });
        assert_eq!(tracker.take_peak().bytes, 0);
    }
}
