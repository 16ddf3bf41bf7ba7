//! The ids of words, which each thread remembers. Most words of a text have occurred before, and looking up a word takes a hundredth of the time that
//! the tokenizers crate takes.

use std::cell::RefCell;

use ottava_common::hash::MIX_STEP;

/// The maximum number of bytes of a word that is remembered.
const MAX_BYTES: usize = 48;

/// The maximum number of words that a thread remembers. The words of a natural language take about 6 MB.
const SLOTS: usize = 1 << 16;

/// An id, and the start and the end of its text within a word, in bytes.
pub(super) type Token = (u32, u32, u32);

struct Known {
    word: Box<str>,
    tokens: Box<[Token]>,
}

/// The remembered words of one tokenizer. Words with the same slot replace each other.
struct Words {
    tokenizer: u64,
    slots: Vec<Option<Known>>,
}

thread_local! {
    static WORDS: RefCell<Words> = const { RefCell::new(Words { tokenizer: 0, slots: Vec::new() }) };
}

/// Calls `take` with the tokens of `word`. They are computed by `encode`, or remembered from an earlier call with the same `tokenizer` number (from
/// 1).
///
/// `encode` must not wait for other threads: while it waits, this thread might call this function again. Returns the errors of `encode`.
pub(super) fn tokens_of<E>(
    tokenizer: u64,
    word: &str,
    encode: impl FnOnce(&str) -> Result<Vec<Token>, E>,
    take: impl FnOnce(&[Token]),
) -> Result<(), E> {
    if word.len() > MAX_BYTES {
        return encode(word).map(|tokens| take(&tokens));
    }
    WORDS.with_borrow_mut(|words| {
        if words.tokenizer != tokenizer {
            words.slots.clear();
            words.slots.resize_with(SLOTS, || None);
            words.tokenizer = tokenizer;
        }
        let slot = &mut words.slots[slot_of(word)];
        let known = match slot {
            Some(known) if *known.word == *word => known,
            slot => slot.insert(Known { word: word.into(), tokens: encode(word)?.into() }),
        };
        take(&known.tokens);
        Ok(())
    })
}

fn slot_of(word: &str) -> usize {
    let mix = |hash: u64, bytes: &[u8]| {
        let mut chunk = [0; 8];
        chunk[..bytes.len()].copy_from_slice(bytes);
        let hash = (hash ^ u64::from_le_bytes(chunk)).wrapping_mul(MIX_STEP);
        hash ^ (hash >> 32)
    };
    let hash = word.as_bytes().chunks(8).fold(word.len() as u64, mix);
    (hash % SLOTS as u64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_has_the_tokens_of_its_tokenizer_and_is_encoded_once() {
        let mut calls = 0;
        let mut tokens = |tokenizer, word: &str, id| {
            let mut found = Vec::new();
            let encode = |_: &str| {
                calls += 1;
                Ok::<_, ()>(vec![(id, 0, word.len() as u32)])
            };
            tokens_of(tokenizer, word, encode, |tokens| found.extend_from_slice(tokens)).unwrap();
            (found[0].0, calls)
        };
        assert_eq!(tokens(1, " word", 5), (5, 1));
        assert_eq!(tokens(1, " word", 6), (5, 1), "it is remembered");
        assert_eq!(tokens(2, " word", 7), (7, 2), "another tokenizer");
        assert_eq!(tokens(1, " word", 8), (8, 3));
        assert_eq!(tokens(1, &"x".repeat(MAX_BYTES + 1), 9), (9, 4));
        assert_eq!(tokens(1, &"x".repeat(MAX_BYTES + 1), 10), (10, 5), "too long to be remembered");
        // The test uses more words than slots.
        for round in 0..2 {
            for i in 0..2 * SLOTS as u32 {
                assert_eq!(tokens(1, &format!(" {i}"), i).0, i, "round {round}");
            }
        }
        assert_eq!(tokens_of(3, "a", |_| Err(()), |_| unreachable!("there are no tokens")), Err(()));
        assert_eq!(tokens(3, "a", 11).0, 11, "an error is not remembered");
    }
}
