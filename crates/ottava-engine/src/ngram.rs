//! Proposals by lookup: the tokens that followed an earlier occurrence of the last tokens (prompt lookup, Saxena 2023; `ngram` in vLLM).

/// A proposer that searches for the longest earlier occurrence of the last tokens, and proposes the tokens that followed it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ngram {
    /// The number of tokens of a proposal.
    pub tokens: usize,
    /// The minimum number of last tokens that must match.
    pub shortest: usize,
    /// The maximum number of last tokens that are compared.
    pub longest: usize,
}

impl Ngram {
    /// Returns up to `most` tokens that may follow `tokens`. If fewer tokens followed the occurrence, the repetition is continued.
    pub fn propose(&self, tokens: &[u32], most: usize) -> Vec<u32> {
        let most = most.min(self.tokens);
        // The position of the tokens after the best occurrence, and the length of this occurrence. Among equal lengths, the latest occurrence wins.
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
