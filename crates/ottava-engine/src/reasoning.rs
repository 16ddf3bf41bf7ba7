//! Reasoning before a constrained text: the constraint begins after the marker that ends the reasoning.
//!
//! Within reasoning, all tokens are allowed except for two kinds: tokens that end the text, and tokens that have the end of the marker and other text
//! after it, because that text would escape the constraint.

use llguidance::toktrie::SimpleVob;
use std::sync::Arc;

/// The byte that special tokens begin with in [`Vocabulary::words`].
const SPECIAL: u8 = 0xff;

/// What grammars know of the tokens.
#[derive(Debug)]
pub struct Vocabulary {
    /// The bytes of each token, by id.
    pub words: Vec<Vec<u8>>,
    /// The tokens that end a text.
    pub ends: Vec<u32>,
    /// The number of tokens that can be drawn.
    pub size: usize,
}

impl Vocabulary {
    /// The text of a token, as bytes.
    fn word(&self, token: u32) -> &[u8] {
        let word = self.words.get(token as usize).map_or(&[][..], Vec::as_slice);
        word.strip_prefix(&[SPECIAL]).unwrap_or(word)
    }

    fn tokens(&self) -> impl Iterator<Item = u32> {
        0..self.size.min(self.words.len()) as u32
    }

    /// The token with this text.
    pub fn token(&self, text: &str) -> Option<u32> {
        self.tokens().find(|&token| self.word(token) == text.as_bytes())
    }
}

/// The texts around reasoning before a constrained text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReasoningMarks<'a> {
    /// The marker that may begin the reasoning; `None` if the reasoning has begun.
    pub open: Option<&'a str>,
    /// The marker that ends it.
    pub close: &'a str,
    /// A token that must come between this marker and the constrained text, if there is one.
    pub then: Option<&'a str>,
}

/// The reasoning of a completion.
#[derive(Clone, Debug)]
pub struct Reasoning {
    vocabulary: Arc<Vocabulary>,
    /// The token that begins the reasoning, if it has not begun. Other tokens begin the constrained text.
    pub open: Option<u32>,
    /// The marker that ends it.
    close: Arc<[u8]>,
    /// The token that comes after this marker, if there is one, and whether it is the next token.
    then: Option<u32>,
    is_closed: bool,
    /// The last bytes, fewer than the marker has.
    tail: Vec<u8>,
    /// The tokens that have the whole marker and other text after it.
    longer: Arc<[u32]>,
}

/// Whether bytes have more than white space.
fn is_text(bytes: &[u8]) -> bool {
    !bytes.iter().all(u8::is_ascii_whitespace)
}

/// Where `marker` begins in `bytes`.
fn find(bytes: &[u8], marker: &[u8]) -> Option<usize> {
    bytes.windows(marker.len()).position(|window| window == marker)
}

impl Reasoning {
    /// Reasoning that the marker `close` ends, and after it the token `then`. If `open` is given, it may begin with this token.
    pub fn new(vocabulary: Arc<Vocabulary>, open: Option<u32>, close: &str, then: Option<u32>) -> Reasoning {
        let close = close.as_bytes();
        let is_longer = |&token: &u32| {
            let word = vocabulary.word(token);
            find(word, close).is_some_and(|at| is_text(&word[at + close.len()..]))
        };
        let longer = vocabulary.tokens().filter(is_longer).collect();
        Reasoning { open, close: close.into(), then, is_closed: false, tail: Vec::new(), longer, vocabulary }
    }

    /// The tokens that may come next within reasoning.
    pub fn allowed(&self) -> SimpleVob {
        if let Some(then) = self.then.filter(|_| self.is_closed) {
            let mut allowed = SimpleVob::alloc(self.vocabulary.words.len());
            allowed.allow_token(then);
            return allowed;
        }
        let mut allowed = SimpleVob::alloc_ones(self.vocabulary.words.len());
        let begun: Vec<&[u8]> = (1..self.close.len())
            .filter(|&n| self.tail.ends_with(&self.close[..n]))
            .map(|n| &self.close[n..])
            .collect();
        let goes_beyond = |&token: &u32| {
            let word = self.vocabulary.word(token);
            begun.iter().any(|rest| word.strip_prefix(*rest).is_some_and(is_text))
        };
        let beyond = self.vocabulary.tokens().filter(|token| !begun.is_empty() && goes_beyond(token));
        let barred = self.vocabulary.ends.iter().chain(self.longer.iter()).copied().chain(beyond);
        barred.for_each(|token| allowed.disallow_token(token));
        allowed
    }

    /// Adds a token. Returns whether it ends the reasoning.
    pub fn push(&mut self, token: u32) -> bool {
        self.tail.extend_from_slice(self.vocabulary.word(token));
        let has_ended = find(&self.tail, &self.close).is_some();
        let kept = self.tail.len().min(self.close.len() - 1);
        self.tail.drain(..self.tail.len() - kept);
        if self.is_closed {
            return true;
        }
        self.is_closed = has_ended;
        has_ended && self.then.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasoning_ends_with_its_marker_and_not_within_a_token() {
        let words = ["a", "<", "/t", ">", ">\n", ">b", "</t>", "</t>b", "\u{0}", "/"];
        let mut words: Vec<Vec<u8>> = words.iter().map(|word| word.as_bytes().to_vec()).collect();
        words[8] = b"\xff</t>".to_vec();
        let vocabulary = Arc::new(Vocabulary { words, ends: vec![0], size: 10 });
        assert_eq!(vocabulary.token("</t>"), Some(6));
        let new = || Reasoning::new(vocabulary.clone(), None, "</t>", None);
        let barred = |reasoning: &Reasoning| {
            let allowed = reasoning.allowed();
            (0..10).filter(|&token| !allowed.is_allowed(token)).collect::<Vec<u32>>()
        };
        let mut reasoning = new();
        assert_eq!(barred(&reasoning), [0, 7]);
        assert!(!reasoning.push(1) && !reasoning.push(1) && !reasoning.push(2));
        assert_eq!(barred(&reasoning), [0, 5, 7]);
        let mut with_space = reasoning.clone();
        assert!(reasoning.push(3) && with_space.push(4) && new().push(6) && new().push(8));
        let mut broken = new();
        assert!(!broken.push(2) && !broken.push(3), "the marker has not begun");
        // A token that must follow the marker is the only one that may.
        let mut with_token = Reasoning::new(vocabulary.clone(), None, "</t>", Some(9));
        assert!(!with_token.push(6));
        assert_eq!(barred(&with_token), [0, 1, 2, 3, 4, 5, 6, 7, 8]);
        assert!(with_token.push(9));
    }
}
