//! Every device has the whole model and computes some of the sequences: whole shares that make the slowest as fast as
//! it can be, and which devices are worth having.

use super::exchange::Exchange;
use crate::search::{Menu, Question};
use plimsoll_core::{Bytes, DeviceSpec, Recipe};

/// The devices of a team with what each can do. Devices that are alike have one menu.
pub(super) struct Crew<'q> {
    /// For each device the question that its menu answers.
    questions: &'q [Question<'q>],
    menus: Vec<Menu<'q>>,
    /// Which menu a device has.
    kind: Vec<usize>,
    /// Sequences of a step.
    total: u64,
}

/// Some devices with their sequences, and the seconds of a step.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Split {
    pub devices: Vec<usize>,
    pub sequences: Vec<u64>,
    pub seconds: f64,
}

/// Whether what one device does is what the other does.
pub(super) fn alike(a: &Question, b: &Question) -> bool {
    let nameless = |device: &DeviceSpec| DeviceSpec { name: String::new(), ..device.clone() };
    nameless(a.device) == nameless(b.device) && a.host == b.host && a.sequences == b.sequences && a.pins == b.pins
}

impl<'q> Crew<'q> {
    /// Menus for questions that ask for about as many sequences as will be each one's share.
    pub fn new(questions: &'q [Question<'q>], total: u64) -> Crew<'q> {
        let mut first: Vec<usize> = Vec::new();
        let mut kind = Vec::new();
        for question in questions {
            let known = first.iter().position(|&number| alike(&questions[number], question));
            kind.push(known.unwrap_or(first.len()));
            if known.is_none() {
                first.push(kind.len() - 1);
            }
        }
        let menus: Vec<Menu> = first.iter().map(|&number| Menu::new(&questions[number])).collect();
        Crew { questions, menus, kind, total }
    }

    fn menu(&self, device: usize) -> &Menu<'q> {
        &self.menus[self.kind[device]]
    }

    /// Whether two devices have one menu.
    pub fn alike(&self, one: usize, other: usize) -> bool {
        self.kind[one] == self.kind[other]
    }

    /// The devices that can hold the model.
    pub fn able(&self) -> Vec<usize> {
        (0..self.kind.len()).filter(|&device| !self.menu(device).is_empty()).collect()
    }

    /// What the devices have to exchange.
    pub fn exchange(&self, devices: &[usize]) -> Exchange {
        let questions: Vec<&Question> = devices.iter().map(|&device| &self.questions[device]).collect();
        Exchange::between(&questions)
    }

    /// The fastest shares of some devices, whether or not fewer would be faster; `None` where one of them would have none.
    pub fn split(&self, devices: &[usize]) -> Option<Split> {
        let exchange = self.exchange(devices);
        let wait = |passes: f64| exchange.beyond(passes);
        let seconds_of = |device: usize, sequences: u64| match sequences {
            0 => 0.0,
            _ => self.menu(device).best(sequences, &wait).map_or(f64::INFINITY, |(_, seconds)| seconds),
        };
        let within = |seconds: f64| devices.iter().map(move |&device| (device, seconds));
        let most = |(device, seconds): (usize, f64)| self.menu(device).most(seconds, &wait).min(self.total);
        // The least time in which all of it is done; the one that does it alone in the shortest has time enough.
        let alone = devices.iter().map(|&device| seconds_of(device, self.total)).fold(f64::INFINITY, f64::min);
        if !alone.is_finite() {
            return None;
        }
        let (mut low, mut high) = (0.0, alone);
        for _ in 0..100 {
            let middle = 0.5 * (low + high);
            let done: u64 = within(middle).map(most).sum();
            if done >= self.total { high = middle } else { low = middle }
        }
        let mut sequences: Vec<u64> = within(high).map(most).collect();
        // What is too much is taken from those that take longest, so that devices that are alike do alike.
        let mut seconds: Vec<f64> =
            devices.iter().zip(&sequences).map(|(&device, &own)| seconds_of(device, own)).collect();
        for _ in self.total..sequences.iter().sum() {
            let longest = |a: &usize, b: &usize| {
                seconds[*a].total_cmp(&seconds[*b]).then(sequences[*a].cmp(&sequences[*b])).then(a.cmp(b))
            };
            let from = (0..devices.len()).filter(|&rank| sequences[rank] > 0).max_by(longest)?;
            sequences[from] -= 1;
            seconds[from] = seconds_of(devices[from], sequences[from]);
        }
        let slowest = seconds.iter().copied().fold(0.0, f64::max);
        let all_work = sequences.iter().all(|&own| own > 0);
        all_work.then(|| Split { devices: devices.to_vec(), sequences, seconds: slowest })
    }

    /// The fastest of all teams of these devices that are looked at: the fastest so many of them, and then with one more or
    /// one less for as long as that helps.
    pub fn fastest(&self, able: &[usize]) -> Option<Split> {
        let alone = |device: usize| self.split(&[device]).map_or(f64::INFINITY, |split| split.seconds);
        let mut order: Vec<(usize, f64)> = able.iter().map(|&device| (device, alone(device))).collect();
        order.sort_by(|a, b| a.1.total_cmp(&b.1));
        let of_first = |number: usize| {
            let mut devices: Vec<usize> = order[..number].iter().map(|(device, _)| *device).collect();
            devices.sort_unstable();
            self.split(&devices)
        };
        let faster = |best: Option<Split>, other: Option<Split>| match (best, other) {
            (Some(best), Some(other)) if other.seconds < best.seconds => Some(other),
            (best, other) => best.or(other),
        };
        let mut best = (1..=order.len()).map(of_first).fold(None, faster)?;
        loop {
            let changed = able.iter().filter_map(|&device| {
                let mut devices = best.devices.clone();
                match devices.binary_search(&device) {
                    Ok(at) => drop(devices.remove(at)),
                    Err(at) => devices.insert(at, device),
                }
                if devices.is_empty() { None } else { self.split(&devices) }
            });
            let next = changed.map(Some).fold(None, faster);
            match next {
                Some(next) if next.seconds < best.seconds => best = next,
                _ => return Some(best),
            }
        }
    }

    /// The recipe of each of a team.
    pub fn recipes(&self, split: &Split) -> Vec<Recipe> {
        let exchange = self.exchange(&split.devices);
        let of = |(&device, &own): (&usize, &u64)| {
            let best = self.menu(device).best(own, &|passes| exchange.beyond(passes));
            best.expect("a share has a recipe").0.recipe.clone()
        };
        split.devices.iter().zip(&split.sequences).map(of).collect()
    }

    /// Bytes on the host that each of a team wants.
    pub fn host_bytes(&self, split: &Split) -> Vec<Bytes> {
        let recipes = self.recipes(split);
        let of = |(&device, recipe): (&usize, &Recipe)| Bytes(self.menu(device).host_bytes_of(recipe));
        split.devices.iter().zip(&recipes).map(of).collect()
    }

    /// Looks at recipes near those of a team; answers whether there were any.
    pub fn look_near(&mut self, split: &Split) {
        let exchange = self.exchange(&split.devices);
        for (&device, &own) in split.devices.iter().zip(&split.sequences) {
            self.menus[self.kind[device]].look_near(own, &|passes| exchange.beyond(passes));
        }
    }

    /// Takes a recipe off a device's menu.
    pub fn strike(&mut self, device: usize, recipe: &Recipe) {
        self.menus[self.kind[device]].strike(recipe);
    }
}
