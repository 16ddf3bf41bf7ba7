//! Divides the text of an answer into reasoning, content and calls, while the text is received.

use crate::channels::Others;
use crate::format::{Format, Part, Parts, Plain, Step};
use crate::reasoning::ReasoningParser;
use crate::tool_calls::{Calls, Tools};

/// The length of a text that waits from which white space is not read alone, in bytes.
const LONG: usize = 4096;

/// How the text of an answer is divided.
#[derive(Clone, Debug)]
pub struct Division {
    /// How reasoning is marked, if the answer may have some.
    pub reasoning: Option<ReasoningParser>,
    /// Whether the prompt ends within reasoning.
    pub opened: bool,
    /// Whether a constraint applies to the text after the reasoning.
    pub is_constrained: bool,
    /// The form of calls, if the answer may have some.
    pub calls: Option<Calls>,
    /// The tools of the request.
    pub tools: Tools,
    /// The maximum number of calls. Text after the last call is dropped.
    pub most: usize,
}

impl Division {
    /// The markers that texts without special tokens must keep.
    pub fn markers(&self) -> Vec<&'static str> {
        let mut markers = self.reasoning.map(ReasoningParser::markers).unwrap_or_default();
        if let Some(Calls::Free(parser)) = &self.calls {
            markers.extend(parser.markers());
        }
        markers
    }
}

/// Divides a text that is received in parts.
pub struct Reader {
    /// The formats of the text, one after the other.
    formats: Vec<Box<dyn Format>>,
    /// The number of formats that have ended.
    ended: usize,
    /// The received text that was not read.
    held: String,
    parts: Parts,
}

impl Reader {
    /// A reader of a text that has not begun.
    pub fn new(division: &Division) -> Reader {
        let Division { reasoning, opened, is_constrained, calls, tools, most } = division;
        let others = match (is_constrained, calls) {
            (true, _) => Others::Reasoning,
            (false, Some(_)) => Others::Calls,
            (false, None) => Others::Content,
        };
        let mut formats = Vec::new();
        formats.extend(reasoning.map(|reasoning| reasoning.format(*opened, others)));
        // Channels have calls and content too.
        if !reasoning.is_some_and(ReasoningParser::has_channels) {
            formats
                .push(calls.as_ref().map_or_else(|| Box::new(Plain) as Box<dyn Format>, |calls| calls.format(tools)));
        }
        Reader { formats, ended: 0, held: String::new(), parts: Parts::new(*most) }
    }

    /// Whether the text has all calls that it may have.
    pub fn is_full(&self) -> bool {
        self.parts.is_full()
    }

    /// Whether the text at this place is reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.formats.get(self.ended).is_some_and(|format| format.is_reasoning())
    }

    /// Adds text, the last one if `last`. Returns what was found.
    pub fn push(&mut self, text: &str, last: bool) -> Vec<Part> {
        let waits = self.held.len() >= LONG && !last;
        self.held.push_str(text);
        // White space completes nothing in a long text that waits, and models may write very much of it.
        if waits && text.trim_start().is_empty() {
            return Vec::new();
        }
        let mut at = 0;
        while !self.parts.is_full() {
            match self.formats[self.ended].read(&self.held[at..], last, &mut self.parts) {
                Step::Read(bytes) => at += bytes,
                Step::Next if self.ended + 1 < self.formats.len() => self.ended += 1,
                Step::Next | Step::Wait => break,
            }
        }
        match self.parts.is_full() {
            true => self.held.clear(),
            false => drop(self.held.drain(..at)),
        }
        if last {
            let rest = std::mem::take(&mut self.held);
            if !rest.is_empty() {
                self.parts.content(&rest);
            }
            self.parts.finish();
        }
        self.parts.take()
    }
}

#[cfg(test)]
#[path = "reader_tests.rs"]
mod tests;
