//! Proposals by lookup: tokens that followed an earlier occurrence of the last ones (prompt lookup, Saxena 2023; `ngram` in vLLM).

/// Proposes what followed the last occurrence of the longest sequence of last tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ngram {
    /// Tokens of a proposal.
    pub tokens: usize,
    /// The fewest last tokens that an earlier occurrence has.
    pub shortest: usize,
    /// The most last tokens that are compared.
    pub longest: usize,
}

impl Ngram {
    /// Up to `most` tokens that may follow `tokens`. A repetition that is shorter than that is continued.
    pub fn propose(&self, tokens: &[u32], most: usize) -> Vec<u32> {
        let most = most.min(self.tokens);
        // Where the tokens after the best occurrence begin, and its length. Later occurrences win among equals.
        let mut best = (0, 0);
        for end in (1..tokens.len()).rev() {
            let pairs = tokens[..end].iter().rev().zip(tokens.iter().rev());
            let length = pairs.take(self.longest).take_while(|(a, b)| a == b).count();
            if length > best.1 {
                best = (end, length);
            }
            if length == self.longest {
                break;
            }
        }
        let (next, length) = best;
        let mut proposed: Vec<u32> = Vec::new();
        if length >= self.shortest {
            for at in next..next + most {
                proposed.push(tokens.get(at).copied().unwrap_or_else(|| proposed[at - tokens.len()]));
            }
        }
        proposed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_and_then_the_last_occurrence_is_continued() {
        let ngram = Ngram { tokens: 4, shortest: 2, longest: 3 };
        let propose = |tokens: &[u32]| ngram.propose(tokens, 9);
        assert_eq!(propose(&[1, 2, 3, 4, 5, 6, 1, 2, 3]), [4, 5, 6, 1]);
        assert_eq!(
            propose(&[1, 2, 7, 8, 1, 2, 9, 1, 2]),
            [9, 1, 2, 9],
            "the last occurrence, whose repetition goes on"
        );
        assert_eq!(propose(&[5, 1, 2, 7, 8, 6, 1, 2, 9, 5, 1, 2]), [7, 8, 6, 1], "a longer one before it");
        assert_eq!(propose(&[4, 4, 4]), [4, 4, 4, 4]);
        assert_eq!(ngram.propose(&[1, 2, 3, 4, 1, 2, 3], 2), [4, 1]);
        for without in [&[1, 2, 3][..], &[3, 1, 3], &[], &[1]] {
            assert!(propose(without).is_empty(), "{without:?}");
        }
    }
}
