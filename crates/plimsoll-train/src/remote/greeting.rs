//! The greeting of a connection between two ranks of a team. Both prove that they know the secret of the team, which
//! itself never crosses the connection.
//!
//! ```text
//! caller                          listener
//!   team, ranks, nonce, proof ──►
//!                             ◄── nonce, proof
//!   proof                     ──►
//!                             ◄── +
//! ```
//!
//! Each proof is an HMAC-SHA-256 under the secret, of all that was sent before. A nonce is a number that is used only
//! once, so a recorded proof is worthless on another connection.

use hmac::{Hmac, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;
use std::io::{self, ErrorKind};

/// First bytes of every greeting.
const MAGIC: &[u8; 8] = b"plimsoll";
const NUMBERS_BYTES: usize = 16;
const NONCE_BYTES: usize = 16;
/// Size of a proof, which is all of the caller's answer to a challenge.
pub(super) const PROOF_BYTES: usize = 32;
/// Size of an encoded [`Greeting`].
pub(super) const GREETING_BYTES: usize = MAGIC.len() + NUMBERS_BYTES + NONCE_BYTES + PROOF_BYTES;
/// Size of an encoded [`Challenge`].
pub(super) const CHALLENGE_BYTES: usize = NONCE_BYTES + PROOF_BYTES;
/// The listener's reply to a correct answer.
pub(super) const ACCEPTED: u8 = b'+';

/// The purpose of a proof: no proof can be taken for another one.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Purpose {
    Greeting = 0,
    Challenge = 1,
    Response = 2,
}

/// Returns an HMAC under `secret`, of a purpose and of parts with fixed lengths.
fn mac(secret: &str, purpose: Purpose, parts: &[&[u8]]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret.as_bytes()).expect("a key may have any length");
    mac.update(&[purpose as u8]);
    parts.iter().for_each(|part| mac.update(part));
    mac
}

fn is_proof(mac: Hmac<Sha256>, proof: &[u8]) -> bool {
    // The comparison takes the same time for every wrong proof.
    mac.verify_slice(proof).is_ok()
}

/// Returns random bytes of the system. Needs no file, because the table of files may be full.
pub(super) fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // The system returns up to 256 bytes at once.
    match getrandom(&mut bytes[..], GetRandomFlags::empty())? {
        count if count == N => Ok(bytes),
        _ => Err(ErrorKind::UnexpectedEof.into()),
    }
}

/// First message on a connection: the caller's rank, and its proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Greeting {
    pub team: u64,
    /// Rank of the caller.
    pub from: u32,
    /// Rank of the listener.
    pub to: u32,
    nonce: [u8; NONCE_BYTES],
    proof: [u8; PROOF_BYTES],
}

impl Greeting {
    /// Creates a greeting for one connection.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub fn new(team: u64, [from, to]: [u32; 2], secret: &str) -> io::Result<Greeting> {
        let greeting = Greeting { team, from, to, nonce: random_bytes()?, proof: [0; PROOF_BYTES] };
        let proof = greeting.mac(secret, Purpose::Greeting, &[]).finalize().into_bytes().into();
        Ok(Greeting { proof, ..greeting })
    }

    fn mac(&self, secret: &str, purpose: Purpose, further: &[u8]) -> Hmac<Sha256> {
        let Greeting { team, from, to, nonce, .. } = self;
        mac(secret, purpose, &[&team.to_le_bytes(), &from.to_le_bytes(), &to.to_le_bytes(), nonce, further])
    }

    /// Returns whether these bytes may be the first ones of a greeting.
    pub fn may_begin_with(bytes: &[u8]) -> bool {
        bytes.iter().zip(MAGIC).all(|(byte, expected)| byte == expected)
    }

    /// Encodes the greeting.
    pub fn to_bytes(self) -> Vec<u8> {
        let Greeting { team, from, to, nonce, proof } = self;
        [&MAGIC[..], &team.to_le_bytes(), &from.to_le_bytes(), &to.to_le_bytes(), &nonce, &proof].concat()
    }

    /// Decodes a greeting. Returns `None` for bytes that are none.
    pub fn from_bytes(bytes: &[u8; GREETING_BYTES]) -> Option<Greeting> {
        let rest = bytes.strip_prefix(MAGIC)?;
        let (team, rest) = rest.split_first_chunk()?;
        let (from, rest) = rest.split_first_chunk()?;
        let (to, rest) = rest.split_first_chunk()?;
        let (nonce, proof) = rest.split_first_chunk()?;
        let (team, from, to) = (u64::from_le_bytes(*team), u32::from_le_bytes(*from), u32::from_le_bytes(*to));
        Some(Greeting { team, from, to, nonce: *nonce, proof: proof.try_into().ok()? })
    }

    /// Returns whether the sender knew the secret when the greeting was first sent.
    pub fn is_proven(&self, secret: &str) -> bool {
        is_proof(self.mac(secret, Purpose::Greeting, &[]), &self.proof)
    }

    /// Returns the caller's answer to a challenge.
    ///
    /// # Errors
    /// The challenge does not prove that the listener knows the secret.
    pub fn answer(&self, challenge: &[u8; CHALLENGE_BYTES], secret: &str) -> io::Result<[u8; PROOF_BYTES]> {
        let (nonce, proof) = challenge.split_at(NONCE_BYTES);
        if !is_proof(self.mac(secret, Purpose::Challenge, nonce), proof) {
            return Err(io::Error::new(ErrorKind::InvalidData, "another program replies at this port"));
        }
        Ok(self.mac(secret, Purpose::Response, nonce).finalize().into_bytes().into())
    }
}

/// The listener's side of a greeting that a team expects.
#[derive(Clone, Copy, Debug)]
pub(super) struct Challenge {
    greeting: Greeting,
    nonce: [u8; NONCE_BYTES],
}

impl Challenge {
    /// Creates the challenge for the sender of a greeting.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub fn new(greeting: Greeting) -> io::Result<Challenge> {
        Ok(Challenge { greeting, nonce: random_bytes()? })
    }

    /// Returns the rank of the caller.
    pub fn caller(&self) -> u32 {
        self.greeting.from
    }

    /// Encodes the challenge, with the listener's proof.
    pub fn to_bytes(self, secret: &str) -> Vec<u8> {
        let proof = self.greeting.mac(secret, Purpose::Challenge, &self.nonce).finalize().into_bytes();
        [&self.nonce[..], &proof[..]].concat()
    }

    /// Returns whether these bytes are the answer of a caller that knows the secret.
    pub fn is_answered_by(&self, answer: &[u8], secret: &str) -> bool {
        is_proof(self.greeting.mac(secret, Purpose::Response, &self.nonce), answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn challenge_bytes(challenge: Challenge, secret: &str) -> [u8; CHALLENGE_BYTES] {
        challenge.to_bytes(secret).try_into().unwrap()
    }

    #[test]
    fn both_sides_prove_the_secret() {
        let greeting = Greeting::new(3, [2, 1], "known").unwrap();
        let bytes = greeting.to_bytes();
        assert!(!bytes.windows(5).any(|window| window == b"known"));
        let received = Greeting::from_bytes(bytes[..].try_into().unwrap()).unwrap();
        assert_eq!(received, greeting);
        assert!(received.is_proven("known") && !received.is_proven("guessed") && !received.is_proven(""));
        let challenge = Challenge::new(received).unwrap();
        let answer = greeting.answer(&challenge_bytes(challenge, "known"), "known").unwrap();
        assert!(challenge.is_answered_by(&answer, "known") && !challenge.is_answered_by(&answer, "guessed"));
        // A listener without the secret gets no answer.
        let error = greeting.answer(&challenge_bytes(challenge, "guessed"), "known").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData);
    }

    #[test]
    fn replayed_answer_fails() {
        let greeting = Greeting::new(3, [2, 1], "known").unwrap();
        let recorded = Challenge::new(greeting).unwrap();
        let answer = greeting.answer(&challenge_bytes(recorded, "known"), "known").unwrap();
        // The greeting still has a valid proof, but the listener has drawn another nonce.
        let later = Challenge::new(greeting).unwrap();
        assert!(greeting.is_proven("known") && !later.is_answered_by(&answer, "known"));
        let own_proof = challenge_bytes(later, "known");
        assert!(!later.is_answered_by(&own_proof[NONCE_BYTES..], "known"), "a proof of the listener is no answer");
    }

    #[test]
    fn changed_numbers_have_no_proof() {
        let greeting = Greeting::new(3, [2, 1], "known").unwrap();
        for changed in
            [Greeting { team: 4, ..greeting }, Greeting { from: 1, ..greeting }, Greeting { to: 2, ..greeting }]
        {
            assert!(!changed.is_proven("known"), "{changed:?}");
        }
    }
}
