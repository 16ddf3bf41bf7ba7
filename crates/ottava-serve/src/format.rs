//! What the text of an answer consists of, and how it is read while it is received.
//!
//! A [`Format`] reads the text from its beginning and writes [`Part`]s. What it writes depends on the text only, and not on how the text is cut, so
//! a streamed answer equals a whole answer.

/// A part of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Text in which the model thinks.
    Reasoning(String),
    /// Text for the reader.
    Content(String),
    /// A call begins.
    Call {
        /// The name of the function.
        name: String,
        /// The id that the model gives the call.
        id: Option<String>,
    },
    /// Further text of the arguments of the last call.
    Arguments(String),
    /// The last call is complete, or the answer ends within it.
    EndOfCall,
}

/// What a format has done.
#[derive(Debug, PartialEq)]
pub enum Step {
    /// Has read this many bytes, or has changed its state.
    Read(usize),
    /// Needs more text.
    Wait,
    /// The rest of the text has another format.
    Next,
}

/// Reads a text.
pub trait Format: Send + Sync {
    /// Reads from `text`, which begins where the last call has stopped and is all that was received. With `last`, no more text comes, and what the
    /// format does not read becomes content.
    fn read(&mut self, text: &str, last: bool, parts: &mut Parts) -> Step;

    /// Whether the text at this place is reasoning.
    fn is_reasoning(&self) -> bool {
        false
    }
}

/// The parts that were read since the last [`Parts::take`].
#[derive(Debug)]
pub struct Parts {
    parts: Vec<Part>,
    /// The maximum number of calls.
    most: usize,
    /// The number of calls that have begun.
    calls: usize,
    /// Whether the last call has not ended.
    is_open: bool,
    /// White space that is content only if more content follows.
    space: String,
    /// Whether white space that comes next is not content, because it follows reasoning or a call.
    trims: bool,
    /// White space that is reasoning only if more reasoning follows.
    reasoning_space: String,
    /// Whether there was reasoning other than white space.
    has_reasoning: bool,
}

impl Parts {
    /// No parts. There will be at most `most` calls.
    pub fn new(most: usize) -> Parts {
        Parts {
            parts: Vec::new(),
            most,
            calls: 0,
            is_open: false,
            space: String::new(),
            trims: false,
            reasoning_space: String::new(),
            has_reasoning: false,
        }
    }

    /// Whether all calls that there may be are complete.
    pub fn is_full(&self) -> bool {
        self.calls >= self.most && !self.is_open
    }

    /// The number of calls that have begun.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Adds content. White space before calls, after calls and after reasoning is not content.
    pub fn content(&mut self, text: &str) {
        let text = if self.trims && self.space.is_empty() { text.trim_start() } else { text };
        let end = text.trim_end().len();
        if end > 0 {
            let content = std::mem::take(&mut self.space) + &text[..end];
            match self.parts.last_mut() {
                Some(Part::Content(before)) => before.push_str(&content),
                _ => self.parts.push(Part::Content(content)),
            }
            self.trims = false;
        }
        self.space.push_str(&text[end..]);
    }

    /// Adds reasoning. White space at its beginning and end is dropped.
    pub fn reasoning(&mut self, text: &str) {
        let text = if self.has_reasoning { text } else { text.trim_start() };
        let end = text.trim_end().len();
        if end > 0 {
            let reasoning = std::mem::take(&mut self.reasoning_space) + &text[..end];
            match self.parts.last_mut() {
                Some(Part::Reasoning(before)) => before.push_str(&reasoning),
                _ => self.parts.push(Part::Reasoning(reasoning)),
            }
            self.has_reasoning = true;
        }
        self.reasoning_space.push_str(&text[end..]);
    }

    /// Ends the reasoning.
    pub fn end_reasoning(&mut self) {
        self.trims = true;
    }

    /// Begins a call.
    pub fn call(&mut self, name: &str, id: Option<String>) {
        self.end_call();
        self.space.clear();
        self.trims = true;
        self.calls += 1;
        self.is_open = true;
        self.parts.push(Part::Call { name: name.into(), id });
    }

    /// Adds text of the arguments of the call that has begun.
    pub fn arguments(&mut self, text: &str) {
        match self.parts.last_mut() {
            _ if text.is_empty() => {}
            Some(Part::Arguments(before)) => before.push_str(text),
            _ => self.parts.push(Part::Arguments(text.into())),
        }
    }

    /// Ends the call that has begun, if one has.
    pub fn end_call(&mut self) {
        if std::mem::take(&mut self.is_open) {
            self.parts.push(Part::EndOfCall);
        }
    }

    /// Adds a whole call.
    pub fn whole_call(&mut self, name: &str, arguments: &str) {
        self.call(name, None);
        self.arguments(arguments);
        self.end_call();
    }

    /// Ends the text.
    pub fn finish(&mut self) {
        self.end_call();
        let space = std::mem::take(&mut self.space);
        if !self.trims && !space.is_empty() {
            self.parts.push(Part::Content(space));
        }
    }

    /// The parts since the last call.
    pub fn take(&mut self) -> Vec<Part> {
        std::mem::take(&mut self.parts)
    }
}

/// The length of the longest end of `text` that may be the beginning of one of `markers`.
pub fn partial(text: &str, markers: &[&str]) -> usize {
    let of =
        |marker: &&str| (1..marker.len()).rev().find(|&n| marker.is_char_boundary(n) && text.ends_with(&marker[..n]));
    markers.iter().filter_map(of).max().unwrap_or(0)
}

/// The marker that comes first in `text`, and where it begins.
pub fn first<'a>(text: &str, markers: &[&'a str]) -> Option<(usize, &'a str)> {
    let found = markers.iter().filter_map(|marker| Some((text.find(marker)?, *marker)));
    // Of two markers at the same place, the longer one counts.
    found.min_by_key(|(at, marker)| (*at, usize::MAX - marker.len()))
}

/// A search for a marker in a text that grows at its end. It does not search the same text twice.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Search {
    /// Where the marker may begin.
    from: usize,
}

impl Search {
    /// Returns where the marker begins in `text`, which begins as in earlier calls.
    pub fn find(&mut self, text: &str, marker: &str) -> Option<usize> {
        let found = text[self.from..].find(marker).map(|at| self.from + at);
        self.from = text.len() - partial(text, &[marker]);
        found
    }
}

/// The first `bytes` bytes of a text, or fewer so that no character is cut.
pub fn start_of(text: &str, bytes: usize) -> &str {
    let end = (0..=bytes.min(text.len())).rev().find(|&end| text.is_char_boundary(end));
    &text[..end.unwrap_or(0)]
}

/// Gives text before the first of `markers` to `add`. `Err` has the step that this is; `Ok` is the marker at the beginning of the text.
pub fn before<'a>(
    text: &str,
    markers: &[&'a str],
    last: bool,
    mut add: impl FnMut(&str),
) -> std::result::Result<&'a str, Step> {
    let end = match first(text, markers) {
        Some((0, marker)) => return Ok(marker),
        Some((at, _)) => at,
        None if last => text.len(),
        None => text.len() - partial(text, markers),
    };
    if end == 0 {
        return Err(Step::Wait);
    }
    add(&text[..end]);
    Err(Step::Read(end))
}

/// Whether `text` is empty, or the beginning of `marker` without its end.
pub fn may_become(text: &str, marker: &str) -> bool {
    text.len() < marker.len() && marker.starts_with(text)
}

/// Text that is content as it is.
pub struct Plain;

impl Format for Plain {
    fn read(&mut self, text: &str, _last: bool, parts: &mut Parts) -> Step {
        if text.is_empty() {
            return Step::Wait;
        }
        parts.content(text);
        Step::Read(text.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_goes_on_where_it_was() {
        let (text, mut search) = ("a<e ü<en<end>", Search::default());
        for (end, _) in text.char_indices() {
            assert_eq!(search.find(&text[..end], "<end>"), None);
            assert!(search.from + "<end>".len() > end, "{} of {end}", search.from);
        }
        assert_eq!(search.find(text, "<end>"), Some(9));
        assert_eq!([0, 3, 4, 5, 99].map(|bytes| start_of("abü", bytes)), ["", "ab", "abü", "abü", "abü"]);
    }
}
