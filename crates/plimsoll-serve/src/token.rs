//! The token that a client on another machine needs.

use rustix::rand::{GetRandomFlags, getrandom};
use std::fmt;
use std::io::{self, ErrorKind};
use subtle::ConstantTimeEq;

/// Random bytes of a token.
const TOKEN_BYTES: usize = 32;

/// A random token: 64 hexadecimal digits. A server has another one after each start.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

impl Token {
    /// Creates a token of random bytes of the system.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub fn random() -> io::Result<Token> {
        let mut bytes = [0; TOKEN_BYTES];
        // The system returns up to 256 bytes at once.
        match getrandom(&mut bytes[..], GetRandomFlags::empty())? {
            TOKEN_BYTES => Ok(Token(bytes.iter().map(|byte| format!("{byte:02x}")).collect())),
            _ => Err(ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Reads a token from its digits; `None` for other text.
    pub fn parse(digits: &str) -> Option<Token> {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_token = digits.len() == 2 * TOKEN_BYTES && digits.bytes().all(is_digit);
        is_token.then(|| Token(digits.to_owned()))
    }

    /// Returns whether a client knows the token. The comparison takes the same time for every text of its length.
    pub(crate) fn is(&self, text: &[u8]) -> bool {
        self.0.as_bytes().ct_eq(text).into()
    }

    /// Returns the digits, to print them once.
    pub fn digits(&self) -> &str {
        &self.0
    }
}

/// Hides the digits, so that no log holds them by accident.
impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_all_digits_match() {
        let token = Token::random().unwrap();
        let digits = token.digits();
        assert_eq!(digits.len(), 2 * TOKEN_BYTES);
        assert!(token.is(digits.as_bytes()));
        let other = if digits.ends_with('0') { "1" } else { "0" };
        for wrong in ["", &digits[1..], &format!("{digits}0"), &format!("{}{other}", &digits[..digits.len() - 1])] {
            assert!(!token.is(wrong.as_bytes()), "{wrong}");
        }
        assert_ne!(Token::random().unwrap(), token);
        assert_eq!(Token::parse(digits), Some(token.clone()));
        assert_eq!((Token::parse(&digits[1..]), Token::parse(&digits.replace(digits, &"g".repeat(64)))), (None, None));
        assert_eq!(format!("{token:?}"), "Token(…)");
    }
}
