//! The text of a completion while its tokens are drawn.

use ottava_common::error::Result;
use ottava_data::{Detokenizer, Tokenizer};
use std::sync::Arc;

/// A stream of text, which decodes tokens one by one and ends at stop strings.
///
/// Text is returned as soon as it cannot change. It can change while the bytes of a character are incomplete, or while the end of the text may be the
/// beginning of a stop string.
pub struct TextStream {
    stops: Arc<[String]>,
    detokenizer: Detokenizer,
    /// The text that is decoded, but held back.
    held: String,
    stopped: bool,
    /// The number of the stop string at which it has ended.
    stop: Option<usize>,
}

/// The text that a token completes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextPiece {
    /// The new text, which may be empty.
    pub text: String,
    /// Whether a stop string was reached. The text ends before it.
    pub stopped: bool,
}

impl TextStream {
    /// Makes an empty stream that ends before the first of `stops`. Empty stop strings are ignored.
    pub fn new(stops: impl Into<Arc<[String]>>) -> TextStream {
        let mut stops = stops.into();
        if stops.iter().any(String::is_empty) {
            stops = stops.iter().filter(|stop| !stop.is_empty()).cloned().collect();
        }
        TextStream { stops, detokenizer: Detokenizer::default(), held: String::new(), stopped: false, stop: None }
    }

    /// Returns the same stream for a text that follows `prompt`.
    ///
    /// Errors in the same cases as [`Detokenizer::after`].
    pub fn after(self, tokenizer: &Tokenizer, prompt: &[u32]) -> Result<TextStream> {
        Ok(TextStream { detokenizer: Detokenizer::after(tokenizer, prompt)?, ..self })
    }

    /// Returns the text that `token` completes. After a stop string, all further tokens are ignored.
    pub fn push(&mut self, tokenizer: &Tokenizer, token: u32) -> Result<TextPiece> {
        if self.stopped {
            return Ok(TextPiece { text: String::new(), stopped: true });
        }
        self.held.push_str(&self.detokenizer.push(tokenizer, token)?.text);
        Ok(self.release())
    }

    /// The stop string at which the text has ended, if one has ended it; the first in the list of several that begin at the same place.
    pub fn stop(&self) -> Option<&str> {
        self.stop.map(|number| self.stops[number].as_str())
    }

    /// Returns the text that was held back, at the end of the completion.
    pub fn finish(&mut self) -> String {
        if self.stopped {
            return String::new();
        }
        self.held.push_str(self.detokenizer.finish());
        let TextPiece { text, stopped } = self.release();
        self.stopped = true;
        if stopped { text } else { text + &std::mem::take(&mut self.held) }
    }

    /// Takes the part of the held text that cannot belong to a stop string.
    fn release(&mut self) -> TextPiece {
        let places = self.stops.iter().enumerate().filter_map(|(n, stop)| Some((self.held.find(stop.as_str())?, n)));
        if let Some((end, number)) = places.min() {
            (self.stopped, self.stop) = (true, Some(number));
            self.held.truncate(end);
            return TextPiece { text: std::mem::take(&mut self.held), stopped: true };
        }
        let may_begin = |at: &usize| self.stops.iter().any(|stop| stop.starts_with(&self.held[*at..]));
        let certain = self.held.char_indices().map(|(at, _)| at).find(may_begin).unwrap_or(self.held.len());
        let rest = self.held.split_off(certain);
        TextPiece { text: std::mem::replace(&mut self.held, rest), stopped: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn tokenizer() -> Tokenizer {
        Tokenizer::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/tokenizer")).unwrap()
    }

    /// Returns the pieces of `text`, whose tokens are pushed one by one, and the stop string that was reached.
    fn pieces(text: &str, stops: &[&str]) -> (Vec<String>, Option<String>) {
        let tokenizer = tokenizer();
        let mut stream = TextStream::new(stops.iter().map(|stop| stop.to_string()).collect::<Vec<_>>());
        let (mut pieces, mut stopped) = (Vec::new(), false);
        for token in tokenizer.encode(text).unwrap() {
            let piece = stream.push(&tokenizer, token).unwrap();
            assert!(!piece.text.contains(char::REPLACEMENT_CHARACTER), "{:?}", piece.text);
            pieces.push(piece.text);
            stopped |= piece.stopped;
        }
        pieces.push(stream.finish());
        assert_eq!(stopped, stream.stop().is_some());
        (pieces, stream.stop().map(str::to_string))
    }

    #[test]
    fn pieces_are_the_text() {
        for text in ["canary (noun): any finch", " leading", "", "two\n\nlines\r\n", "héllo 日本 🎼!\u{0}"] {
            let (found, stopped) = pieces(text, &["never there", ""]);
            assert_eq!((found.concat().as_str(), stopped), (text, None));
        }
        assert!(pieces("any finch at all", &[]).0.iter().filter(|piece| !piece.is_empty()).count() > 2, "it streams");
    }

    #[test]
    fn text_ends_before_the_first_stop_string() {
        for (stops, expected, stop) in [
            (&["finch"][..], "canary (noun): any ", Some("finch")),
            (&["y finch", "finch"], "canary (noun): an", Some("y finch")),
            (&["finch", "ary"], "can", Some("ary")),
            (&["at the end", " noun"], "canary (noun): any finch of the end", None),
            (&["c"], "", Some("c")),
            (&["end"], "canary (noun): any finch of the ", Some("end")),
        ] {
            let (found, stopped) = pieces("canary (noun): any finch of the end", stops);
            assert_eq!(found.concat(), expected, "{stops:?}");
            assert_eq!(stopped.as_deref(), stop, "{stops:?}");
        }
    }

    #[test]
    fn the_beginning_of_a_stop_string_is_held_back() {
        let tokenizer = tokenizer();
        let mut stream = TextStream::new(["a b c d".to_string()]);
        let mut seen = String::new();
        for token in tokenizer.encode("x a b c e").unwrap() {
            let piece = stream.push(&tokenizer, token).unwrap();
            seen.push_str(&piece.text);
            assert!(["", "x", "x ", "x a b c e"].contains(&seen.as_str()), "{seen:?} shows what may be a stop string");
        }
        assert_eq!(seen, "x a b c e");
    }

    #[test]
    fn a_character_that_is_cut_off_comes_at_the_end() {
        let tokenizer = tokenizer();
        let ids = tokenizer.encode("🎼").unwrap();
        assert!(ids.len() > 1, "it is in several tokens");
        let mut stream = TextStream::new([]);
        for &token in &ids[..ids.len() - 1] {
            assert_eq!(stream.push(&tokenizer, token).unwrap(), TextPiece::default());
        }
        assert_eq!(stream.finish(), char::REPLACEMENT_CHARACTER.to_string());
    }
}
