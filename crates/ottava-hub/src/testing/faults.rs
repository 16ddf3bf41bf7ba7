//! How the server fails.

use ottava_http::testing::{Received, reply, reply_bytes};
use std::ops::Range;

/// The faults that the next requests meet.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The number of requests that are answered with status 429.
    pub busy: usize,
    /// The number of files whose connection is cut after so many bytes of the body.
    pub cuts: usize,
    /// The bytes after which the connection is cut.
    pub cut_after: usize,
    /// The number of files that have one wrong byte.
    pub wrong: usize,
    /// Whether requests for ranges are answered with the whole file.
    pub ignore_ranges: bool,
    /// The number of requests that find their signed address expired.
    pub expired: usize,
    /// The number of uploads that are lost.
    pub lost_uploads: usize,
    /// The number of uploads that find their address expired.
    pub expired_uploads: usize,
    /// The number of commits that are made although the answer says that the server is busy.
    pub lost_commits: usize,
    /// A path that the answer about the storage of files leaves out.
    pub forgotten: Option<String>,
    /// Whether no token may create repositories.
    pub forbids_creation: bool,
    /// Whether listings name the original Hub for their next pages, as a mirror does.
    pub foreign_pages: bool,
    /// The old and the new name of a repository. Requests to the old name are redirected.
    pub renamed: Option<(String, String)>,
    /// A repository that only the holder of the token `granted` may read.
    pub gated: Option<String>,
    /// The pause before each part of a file, so that a client can be killed meanwhile.
    pub slow: Option<std::time::Duration>,
}

impl Faults {
    /// Uses up one fault of a kind. Returns whether there was one.
    pub(super) fn takes(&mut self, count: impl Fn(&mut Faults) -> &mut usize) -> bool {
        let count = count(self);
        let takes = *count > 0;
        *count -= usize::from(takes);
        takes
    }

    /// Returns the answer of a busy server, if it is busy.
    pub(super) fn busy(&mut self) -> Option<Vec<u8>> {
        self.takes(|faults| &mut faults.busy).then(|| reply(429, "Retry-After: 0\r\n", "slow down"))
    }

    /// Returns the redirect to the new name of a repository, if `target` has the old one.
    pub(super) fn moved(&self, target: &str) -> Option<Vec<u8>> {
        let (old, new) = self.renamed.as_ref().filter(|(old, new)| target.contains(old) && !target.contains(new))?;
        Some(reply(307, &format!("Location: {}\r\n", target.replace(old, new)), "moved"))
    }

    /// Returns the answer for a repository that the client may not read.
    pub(super) fn refusal(&self, repo: &str, request: &Received) -> Option<Vec<u8>> {
        let is_gated = self.gated.as_deref() == Some(repo) && request.header("authorization") != Some("Bearer granted");
        is_gated.then(|| reply(403, "X-Error-Code: GatedRepo\r\n", "gated"))
    }

    /// Returns the answer with the `range` of `bytes`.
    pub(super) fn send(&mut self, method: &str, bytes: &[u8], headers: &str, range: Option<&str>) -> Vec<u8> {
        if let Some(pause) = self.slow {
            std::thread::sleep(pause);
        }
        let size = bytes.len();
        let range = range.filter(|_| !self.ignore_ranges).and_then(|text| parse(text, size));
        let (status, part) = match &range {
            Some(range) => (206, range.clone()),
            None => (200, 0..size),
        };
        let of = format!("{headers}Content-Range: bytes {}-{}/{size}\r\n", part.start, part.end.saturating_sub(1));
        let headers = if range.is_some() { &of } else { headers };
        if method == "HEAD" {
            let length = part.end - part.start;
            return format!("HTTP/1.1 {status} x\r\n{headers}Connection: close\r\nContent-Length: {length}\r\n\r\n")
                .into_bytes();
        }
        let mut body = bytes[part].to_vec();
        if !body.is_empty() && self.takes(|faults| &mut faults.wrong) {
            body[0] ^= 1;
        }
        let mut answer = reply_bytes(status, headers, &body);
        if body.len() > self.cut_after && self.takes(|faults| &mut faults.cuts) {
            answer.truncate(answer.len() - body.len() + self.cut_after);
        }
        answer
    }
}

/// Reads `bytes=START-END` and `bytes=START-`.
fn parse(text: &str, size: usize) -> Option<Range<usize>> {
    let (start, end) = text.strip_prefix("bytes=")?.split_once('-')?;
    let end = if end.is_empty() { size } else { end.parse::<usize>().ok()? + 1 };
    Some(start.parse().ok()?..end.min(size)).filter(|range| range.start < range.end)
}
