//! A queue that usually holds one element.

use std::collections::VecDeque;

/// A FIFO queue. The first element is stored inline, so a queue that never holds a second one
/// allocates nothing.
#[derive(Clone, Debug)]
pub struct Fifo<T> {
    /// `None` if the queue is empty.
    first: Option<T>,
    /// The elements behind the first. The memory is allocated when the queue first holds a second
    /// element, and is then kept.
    #[expect(
        clippy::box_collection,
        reason = "queues are moved about with what they are in, and most have no second"
    )]
    rest: Option<Box<VecDeque<T>>>,
}

impl<T> Default for Fifo<T> {
    fn default() -> Self {
        Fifo { first: None, rest: None }
    }
}

impl<T> Fifo<T> {
    /// Appends an element.
    pub fn push_back(&mut self, value: T) {
        match self.first {
            None => self.first = Some(value),
            Some(_) => self.rest.get_or_insert_default().push_back(value),
        }
    }

    /// Removes and returns the first element.
    pub fn pop_front(&mut self) -> Option<T> {
        let first = self.first.take()?;
        self.first = self.rest.as_mut().and_then(|rest| rest.pop_front());
        Some(first)
    }

    /// The first element.
    pub fn front_mut(&mut self) -> Option<&mut T> {
        self.first.as_mut()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// Iterates from the oldest element to the newest.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.first.iter_mut().chain(self.rest.iter_mut().flat_map(|rest| rest.iter_mut()))
    }

    /// Iterates from the oldest element to the newest.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.first.iter().chain(self.rest.iter().flat_map(|rest| rest.iter()))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn is_a_queue(steps in proptest::collection::vec(any::<Option<u8>>(), 0..50)) {
            let (mut fifo, mut model) = (Fifo::default(), VecDeque::new());
            for step in steps {
                match step {
                    Some(value) => {
                        fifo.push_back(value);
                        model.push_back(value);
                    }
                    None => prop_assert_eq!(fifo.pop_front(), model.pop_front()),
                }
                prop_assert_eq!(fifo.is_empty(), model.is_empty());
                prop_assert_eq!(fifo.front_mut(), model.front_mut());
                prop_assert!(fifo.iter().eq(&model));
            }
        }
    }
}
