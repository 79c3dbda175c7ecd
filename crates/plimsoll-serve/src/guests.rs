//! Connections to a server with a token that have not brought it yet. Their number per address is limited, so that
//! strangers cannot take all connections of a server that other machines reach.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, PoisonError};

/// Most connections of one address that have not brought the token. Each further one is answered with 503.
pub const MAX_GUESTS: usize = 16;

/// Number of connections without the token by address.
#[derive(Default)]
pub(crate) struct Guests(Mutex<HashMap<IpAddr, usize>>);

/// A connection. It counts as a guest of its address until it brings the token or is dropped.
pub(crate) struct Guest {
    /// The counter and the address; `None` once the connection does not count.
    counted: Mutex<Option<(Arc<Guests>, IpAddr)>>,
}

impl Guests {
    /// Counts a connection from an address; `None` if that has too many already.
    pub fn admit(guests: &Arc<Guests>, address: IpAddr) -> Option<Guest> {
        let address = network(address);
        let mut counts = guests.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(address).or_default();
        if *count >= MAX_GUESTS {
            return None;
        }
        *count += 1;
        Some(Guest { counted: Mutex::new(Some((Arc::clone(guests), address))) })
    }

    fn release(&self, address: IpAddr) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&address) {
            *count -= 1;
        }
        // The map holds addresses of open connections only, so its size is bounded.
        counts.retain(|_, count| *count > 0);
    }
}

impl Guest {
    /// Returns a connection to a server without a token, which is no guest.
    pub fn trusted() -> Guest {
        Guest { counted: Mutex::new(None) }
    }

    /// Notes that the connection brought the token.
    pub fn trust(&self) {
        let counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((guests, address)) = counted {
            guests.release(address);
        }
    }

    /// Returns whether the connection has brought the token, or needs none.
    pub fn is_trusted(&self) -> bool {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.trust();
    }
}

/// Returns the address, or of IPv6 its network of 64 bits, which one machine usually has for itself.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(guests: &Arc<Guests>, address: &str) -> Vec<Guest> {
        let address: IpAddr = address.parse().unwrap();
        (0..MAX_GUESTS + 1).map_while(|_| Guests::admit(guests, address)).collect()
    }

    #[test]
    fn each_address_has_places_of_its_own() {
        let guests = Arc::default();
        let held: Vec<_> = ["10.0.0.1", "10.0.0.2", "2001:db8::1"].map(|address| fill(&guests, address)).into();
        assert!(held.iter().all(|guests| guests.len() == MAX_GUESTS));
        // The same machine by another of its addresses.
        assert!(fill(&guests, "2001:db8::9:1").is_empty() && fill(&guests, "::ffff:10.0.0.1").is_empty());
        assert_eq!(fill(&guests, "2001:db8:0:1::1").len(), MAX_GUESTS);
    }

    #[test]
    fn places_are_free_after_trust_or_end() {
        let guests = Arc::default();
        let mut held = fill(&guests, "10.0.0.1");
        held[0].trust();
        assert!(held[0].is_trusted() && !held[1].is_trusted());
        // Trusting twice frees one place.
        held[0].trust();
        held.pop();
        assert_eq!(fill(&guests, "10.0.0.1").len(), 2);
        drop(held);
        assert_eq!(fill(&guests, "10.0.0.1").len(), MAX_GUESTS);
        assert!(guests.0.lock().unwrap().is_empty());
    }
}
