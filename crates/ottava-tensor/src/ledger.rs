//! Who holds how much memory in a dry run: all of a run's allocations, and nothing behind them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Counts what is allocated on a device that holds no data, and what for.
#[derive(Debug, Default)]
pub struct Ledger(Mutex<Books>);

#[derive(Debug, Default)]
struct Books {
    /// Live bytes by name, in the order in which names first came.
    accounts: Vec<(&'static str, usize)>,
    /// The accounts of the scopes that are open, outermost first.
    open: Vec<usize>,
    live: usize,
    peak: Holdings,
}

/// What was held at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holdings {
    /// Live bytes.
    pub bytes: usize,
    /// The outermost scope at that moment.
    pub during: &'static str,
    /// Live bytes by the scope in which they were allocated.
    pub by_scope: Vec<(&'static str, usize)>,
}

impl Books {
    fn account(&mut self, name: &'static str) -> usize {
        let known = self.accounts.iter().position(|(known, _)| *known == name);
        known.unwrap_or_else(|| {
            self.accounts.push((name, 0));
            self.accounts.len() - 1
        })
    }

    fn now(&self) -> Holdings {
        Holdings {
            bytes: self.live,
            during: self.open.first().map_or("", |&outermost| self.accounts[outermost].0),
            by_scope: self.accounts.iter().filter(|(_, bytes)| *bytes > 0).copied().collect(),
        }
    }
}

impl Ledger {
    fn books(&self) -> MutexGuard<'_, Books> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The most that was held since the last call, or since the beginning; a new peak starts at what is held now.
    pub fn take_peak(&self) -> Holdings {
        let mut books = self.books();
        let now = books.now();
        std::mem::replace(&mut books.peak, now)
    }

    /// Counts `bytes` for the innermost scope, as long as the entry lives.
    pub(crate) fn enter(self: &Arc<Self>, bytes: usize) -> Entry {
        let mut books = self.books();
        let account = match books.open.last() {
            Some(&innermost) => innermost,
            None => books.account("other"),
        };
        books.accounts[account].1 += bytes;
        books.live += bytes;
        if books.live > books.peak.bytes {
            books.peak = books.now();
        }
        Entry { ledger: self.clone(), account, bytes }
    }

    /// Counts `bytes` that a kernel takes and gives back.
    pub(crate) fn scratch(self: &Arc<Self>, bytes: usize) {
        drop(self.enter(bytes));
    }

    /// What is allocated while the scope lives is counted for `name`, unless an inner scope counts it.
    pub(crate) fn scope(self: &Arc<Self>, name: &'static str) -> Scope {
        let mut books = self.books();
        let account = books.account(name);
        books.open.push(account);
        Scope(Some(self.clone()))
    }
}

/// Bytes that are live.
pub(crate) struct Entry {
    ledger: Arc<Ledger>,
    account: usize,
    bytes: usize,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let mut books = self.ledger.books();
        books.accounts[self.account].1 -= self.bytes;
        books.live -= self.bytes;
    }
}

/// Has a dry run say what memory is for, from [`Device::scope`](crate::Device::scope) on until it is dropped. Nothing elsewhere.
#[must_use]
pub struct Scope(Option<Arc<Ledger>>);

impl Scope {
    /// Where nobody counts.
    pub(crate) const NONE: Scope = Scope(None);
}

impl Drop for Scope {
    fn drop(&mut self) {
        if let Some(ledger) = &self.0 {
            ledger.books().open.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_kept_with_its_scopes() {
        let ledger = Arc::new(Ledger::default());
        let outside = ledger.enter(1);
        let outer = ledger.scope("outer");
        let kept = ledger.enter(10);
        {
            let _inner = ledger.scope("inner");
            drop(ledger.enter(100));
        }
        drop(ledger.enter(50));
        drop((outer, outside));
        let by_scope = vec![("other", 1), ("outer", 10), ("inner", 100)];
        assert_eq!(ledger.take_peak(), Holdings { bytes: 111, during: "outer", by_scope });
        drop(kept);
        assert_eq!(ledger.take_peak(), Holdings { bytes: 10, during: "", by_scope: vec![("outer", 10)] });
        assert_eq!(ledger.take_peak().bytes, 0);
    }
}
