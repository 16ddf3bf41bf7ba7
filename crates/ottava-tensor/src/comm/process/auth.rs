//! Proof of a shared secret by HMAC-SHA-256 (RFC 2104) of random challenges.

use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{self, Read};

/// The number of bytes of a challenge, and of a proof.
pub(super) const PROOF: usize = 32;

/// The number of bytes of an SHA-256 block.
const BLOCK: usize = 64;

/// Returns HMAC-SHA-256 of the concatenated `parts`.
pub(super) fn hmac(key: &[u8], parts: &[&[u8]]) -> [u8; PROOF] {
    let mut block = [0; BLOCK];
    if key.len() > BLOCK {
        block[..PROOF].copy_from_slice(&Sha256::digest(key));
    } else {
        block[..key.len()].copy_from_slice(key);
    }
    let mut inner = Sha256::new_with_prefix(block.map(|byte| byte ^ 0x36));
    for part in parts {
        inner.update(part);
    }
    Sha256::new_with_prefix(block.map(|byte| byte ^ 0x5c)).chain_update(inner.finalize()).finalize().into()
}

/// Compares two byte strings in a time that does not depend on their content.
pub(super) fn equal(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |different, (a, b)| different | (a ^ b)) == 0
}

/// Returns random bytes from the system.
pub fn random_bytes() -> io::Result<[u8; PROOF]> {
    let mut bytes = [0; PROOF];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn hmac_has_the_bits_of_rfc_4231() {
        let short = hmac(b"Jefe", &[b"what do ya want ", b"for nothing?"]);
        assert_eq!(hex(&short), "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
        let long = hmac(&[0xaa; 131], &[b"Test Using Larger Than Block-Size Key - Hash Key First"]);
        assert_eq!(hex(&long), "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    }

    #[test]
    fn proofs_are_compared_whole() {
        assert!(equal(b"abc", b"abc") && !equal(b"abc", b"abd") && !equal(b"abc", b"ab"));
        assert_ne!(random_bytes().unwrap(), random_bytes().unwrap());
    }
}
